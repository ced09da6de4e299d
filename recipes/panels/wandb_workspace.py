"""Makes a saved view of a W&B project with our charts: `python recipes/panels/wandb_workspace.py ENTITY PROJECT`.

Needs the package wandb-workspaces and a login. `--print` shows the panels as JSON instead. The alerts of panels.yaml
are set up by hand: alerts of W&B come from inside a run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

PANELS = Path(__file__).with_name("panels.yaml")


def panels() -> list[dict[str, Any]]:
    """Title and metrics of each chart, with the names that the tracker has."""
    stored = yaml.safe_load(PANELS.read_text(encoding="utf-8"))["panels"]
    return [{"title": one["title"], "y": [f"rollout_corr/{name}" for name in one["metrics"]]} for one in stored]


def main() -> int:
    """Saves the view; returns the exit code."""
    if sys.argv[1:] == ["--print"]:
        print(json.dumps(panels(), indent=2))
        return 0
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces

    entity, project = sys.argv[1:]
    charts = [reports.LinePlot(title=one["title"], x="Step", y=one["y"]) for one in panels()]
    section = workspaces.Section(name="Rollout correction", panels=charts, is_open=True)
    view = workspaces.Workspace(entity=entity, project=project, name="Rollout correction", sections=[section])
    print(view.save().url)
    return 0


if __name__ == "__main__":
    sys.exit(main())
