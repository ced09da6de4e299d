"""Puts our charts into TensorBoard's tab "Custom Scalars": `python recipes/panels/tensorboard_layout.py LOGDIR`.

LOGDIR is the folder in which verl's tensorboard logger writes (TENSORBOARD_DIR).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

PANELS = Path(__file__).with_name("panels.yaml")


def layout() -> dict[str, dict[str, list[Any]]]:
    """What `SummaryWriter.add_custom_scalars` takes: one category with a chart per panel."""
    panels = yaml.safe_load(PANELS.read_text(encoding="utf-8"))["panels"]
    return {
        "rollout correction": {
            panel["title"]: ["Multiline", [f"rollout_corr/{name}$" for name in panel["metrics"]]] for panel in panels
        }
    }


def main() -> int:
    """Writes the layout; returns the exit code."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(sys.argv[1]) as writer:
        writer.add_custom_scalars(layout())
    print(f"wrote the layout into {sys.argv[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
