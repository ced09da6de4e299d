"""What every test shares: how hard hypothesis tries, and how many processes run the tests.

`HYPOTHESIS_PROFILE=slow` runs thousands of examples per property (and ten times the seeded batches of tests/oracle).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))  # the oracle is imported by name, and importlib mode adds no path

for profile, examples in (("default", 150), ("slow", 3000)):
    settings.register_profile(
        profile, max_examples=examples, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

torch.set_num_threads(1)  # batches of a few tokens: threads only wait for each other

REAL_RUNS = ("e2e", "e2e_async", "chaos")
MOST = 4
"""Each process imports torch and verl: more of them than this take more memory than time is saved."""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One process per core; where real runs are chosen, as many as there may be runs at once (e2e/launch.py)."""
    chosen = config.option.markexpr
    if any(mark in chosen and f"not {mark}" not in chosen for mark in REAL_RUNS):
        at_once = int(os.environ.get("ROLLOUT_CORR_RUNS_AT_ONCE", "1"))
        return at_once if at_once > 1 else 0
    return min(os.cpu_count() or 1, MOST)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file stays in one process, with what it starts. Those whose tests talk to verl's own workers (tests/hooks) all
    stay in the same one: the workers are started once.
    """
    with_workers = {item.path for item in items if "pools" in getattr(item, "fixturenames", ())}
    for item in items:
        group = "workers" if item.path in with_workers else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
