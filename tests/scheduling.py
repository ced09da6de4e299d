"""Which tests stay together in one process, and which begin.

xdist's own `loadgroup` writes the group of a test behind its name, which pytest 9.2 no longer lets it do: with it, the
tests of one file were spread over the processes, and each started what the file starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

SHARED = ("pools", "programs", "bare")
"""Fixtures that take long to start: the files in which a function takes one all stay in one process."""

_LONG_RUNS = tuple(f"tests/e2e/test_{name}.py" for name in ("sync", "faults", "sweep", "two_ranks", "v0"))
FIRST = (*SHARED, "tests/test_packaging.py", "tests/kernels/test_on_gpu.py", *_LONG_RUNS)
"""The groups that take longest, so that none of them is left when the other processes are done."""

ROOT = Path(__file__).parents[1]
_PARAMETERS = re.compile(r"^def \w+\(([^)]*)", re.MULTILINE)
_TRAINERS = re.compile("separate_async|one_step_off|fully_async")


@cache
def _group_of_file(file: str) -> str:
    path = ROOT / file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    taken = {name for parameters in _PARAMETERS.findall(text) for name in re.findall(r"\w+", parameters)}
    return next((fixture for fixture in SHARED if fixture in taken), file)


def group(nodeid: str) -> str:
    """A file, or the fixture that several share. Each asynchronous trainer has a run of its own in one file."""
    file, _, name = nodeid.partition("::")
    trainer = _TRAINERS.search(name.partition("[")[2]) if file == "tests/async_trainers/test_real_runs.py" else None
    return f"{file} {trainer[0]}" if trainer else _group_of_file(file)


def in_order(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Group by group, the longest first."""
    first = {name: number for number, name in enumerate(FIRST)}
    return sorted(items, key=lambda item: first.get(group(item.nodeid), len(first)))


class ByGroup(LoadScopeScheduling):
    """Sends a group to one process."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)


def scheduler(config: pytest.Config, log: Any) -> ByGroup:
    """For xdist's hook of the same purpose."""
    return ByGroup(config, log)
