"""docs/live.md has the alerts of recipes/panels/panels.yaml."""

from __future__ import annotations

from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def test_every_alert_stands_in_the_page() -> None:
    page = (ROOT / "docs" / "live.md").read_text(encoding="utf-8")
    for alert in yaml.safe_load((ROOT / "recipes" / "panels" / "panels.yaml").read_text(encoding="utf-8"))["alerts"]:
        assert f"`{alert['metric']}` | " in page
        assert alert["means"] in page
