"""The page in a real headless Chromium: phone and desktop, light and dark, with and without JavaScript."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from report.batches import rows
from verl_rollout_corr.report.charts import charts_of
from verl_rollout_corr.report.evidence import Evidence
from verl_rollout_corr.report.page import Report, render

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--virtual-time-budget=4000",
]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with every chart."""
    evidence = Evidence()
    for step in range(1, 6):
        evidence.add(rows(step, step=step))
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(render(Report("t", "s", "ok", "v", charts=charts_of(evidence))), encoding="utf-8")
    return file


@pytest.mark.parametrize("width", [360, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("script", [True, False])
def test_every_chart_is_drawn_without_an_error(
    page: Path, tmp_path: Path, width: int, scheme: str, script: bool
) -> None:
    settings = [f"--blink-settings=preferredColorScheme={int(scheme == 'light')},scriptEnabled={str(script).lower()}"]
    command = [str(CHROMIUM), *FLAGS, *settings, f"--user-data-dir={tmp_path}", f"--window-size={width},2000"]
    done = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=240, check=True
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    figures = re.findall(r"<figure.*?</figure>", done.stdout, re.DOTALL)
    assert len(figures) == 8
    drawn = ["<canvas" in figure if script and "over-steps" in figure else "<svg" in figure for figure in figures]
    assert all(drawn)
    picture = tmp_path / "page.png"
    subprocess.run([*command, f"--screenshot={picture}", page.as_uri()], capture_output=True, timeout=240, check=True)
    assert picture.stat().st_size > 20_000


def test_the_rows_of_this_test_have_every_chart() -> None:
    evidence = Evidence()
    evidence.add(rows(1))
    assert np.isfinite(evidence.positions).all()
