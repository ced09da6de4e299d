"""The environment variables of a run on this machine's CPU, for every recipe that trains the tiny model."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).resolve().parent

DEFAULTS = {
    "HYDRA_FULL_ERROR": "1",
    "PYTHONUNBUFFERED": "1",
    # Without it Ray shows only one of several lines that differ by their numbers, such as the hook's in each rank.
    "RAY_DEDUP_LOGS": "0",
    # Nothing is downloaded or reported: everything a run needs is on this machine.
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def environment(**defaults: str) -> dict[str, str]:
    """DEFAULTS and these, what the user has set instead, and what no recipe runs without: the platform, which fills in
    the rest, and this folder, in which verl's workers find reward and agent loop.
    """
    path = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
    return {**DEFAULTS, **defaults, **os.environ, "VERL_PLATFORM": "cpu", "PYTHONPATH": path}
