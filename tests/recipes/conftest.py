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
    import run_environment
    import run_log
    import screen
    import seeds
    import train

    modules = (assets, reward, run_environment, run_log, screen, seeds, train)
    yield SimpleNamespace(folder=FOLDER, **{module.__name__: module for module in modules})
    sys.path[:] = path
    for module in modules:
        if module.__name__ not in before:
            del sys.modules[module.__name__]
