"""Which tests stay together in one process, and which begin.

xdist's own `loadgroup` writes the group of a test behind its name, which pytest 9.2 no longer lets it do: with it, the
tests of one file were spread over the processes, and each started what the file starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

SHARED: dict[str, tuple[str, ...]] = {
    "pools": (
        "tests/hooks/test_faults.py",
        "tests/hooks/test_first_invalid.py",
        "tests/hooks/test_gradients.py",
        "tests/hooks/test_rows.py",
        "tests/hooks/test_without_preset.py",
        "tests/hooks/test_worker_metrics.py",
    ),
    "programs": (
        "tests/cli/test_check.py",
        "tests/hydra_apps/test_command_line.py",
        "tests/recipes/test_gpu.py",
        "tests/recipes/test_train.py",
    ),
    "bare": (
        "tests/async_trainers/test_fully_async_process.py",
        "tests/platform/test_register.py",
        "tests/platform/test_shims.py",
    ),
}
"""A fixture that takes long to start, and the files that use it: all in one process, so that it starts once."""

FIRST = (
    "pools",
    "programs",
    "bare",
    "tests/test_packaging.py",
    "tests/kernels/test_on_gpu.py",
    "tests/e2e/test_sync.py",
)
"""The groups that take longest, so that none of them is left when the other processes are done."""

_GROUP = {file: fixture for fixture, files in SHARED.items() for file in files}
_TRAINERS = re.compile("separate_async|one_step_off|fully_async")


def group(nodeid: str) -> str:
    """A file, or the fixture that several share. Each asynchronous trainer has a run of its own in one file."""
    file, _, name = nodeid.partition("::")
    trainer = _TRAINERS.search(name.partition("[")[2]) if file == "tests/async_trainers/test_real_runs.py" else None
    return f"{file} {trainer[0]}" if trainer else _GROUP.get(file, file)


def in_order(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Group by group, the longest first. Raises UsageError for a file that uses something shared and is not listed."""
    for item in items:
        for fixture in SHARED.keys() & set(getattr(item, "fixturenames", ())):
            if group(item.nodeid) != fixture:
                raise pytest.UsageError(f"{item.nodeid} uses {fixture}: add its file to SHARED in tests/scheduling.py")
    first = {name: number for number, name in enumerate(FIRST)}
    return sorted(items, key=lambda item: first.get(group(item.nodeid), len(first)))


class ByGroup(LoadScopeScheduling):
    """Sends a group to one process."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)


def scheduler(config: pytest.Config, log: Any) -> ByGroup:
    """For xdist's hook of the same purpose."""
    return ByGroup(config, log)
