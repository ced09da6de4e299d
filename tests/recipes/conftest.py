"""The recipe's modules: they are scripts in one folder, not a package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "tiny_cpu"


@pytest.fixture
def recipe() -> Iterator[Any]:
    """Its modules by name, and nothing of them left behind."""
    before, path = set(sys.modules), list(sys.path)
    sys.path.insert(0, str(FOLDER))
    import assets
    import reward
    import run_log
    import screen
    import seeds
    import train

    yield SimpleNamespace(
        assets=assets, reward=reward, run_log=run_log, screen=screen, seeds=seeds, train=train, folder=FOLDER
    )
    sys.path[:] = path
    for name in ("assets", "reward", "run_log", "screen", "seeds", "train"):
        if name not in before:
            del sys.modules[name]
