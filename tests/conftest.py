"""What every test shares: how hard hypothesis tries, and how many processes run the tests.

`HYPOTHESIS_PROFILE=slow` runs thousands of examples per property, and twenty times the seeded batches of tests/oracle
and tests/kernels.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))  # the oracle is imported by name, and importlib mode adds no path

for profile, examples in (("default", 60), ("slow", 3000)):
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


SHARED = {"pools": "workers", "programs": "programs", "bare": "bare"}
"""What takes long to start, and the group of the tests that use it."""

LONGEST = ("workers", "programs", "bare", "tests/test_packaging.py", "tests/kernels/test_on_gpu.py")
"""The groups that begin, so that none of them is left when the other processes are done."""


@pytest.fixture(scope="session")
def programs() -> Iterator[Any]:
    """A process that has imported verl and the hook, from which verl's main programs are forked."""
    from hydra_apps.programs import Programs

    with Programs() as process:
        yield process


@pytest.fixture(scope="session")
def bare() -> Iterator[Any]:
    """A process that has imported what verl imports, and neither verl nor vLLM nor this package."""
    from forked import WITHOUT_VLLM, Warm

    ours = {name: value for name, value in os.environ.items() if not name.startswith(("VERL_", "VLLM_"))}
    ours["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), ours.get("PYTHONPATH")]))
    with Warm(WITHOUT_VLLM, ours | {"OMP_NUM_THREADS": "1"}) as process:
        yield process


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A file stays in one process, with what it starts. Those that use something of SHARED all stay in the same one,
    where it is started once. xdist is told to keep the order (pyproject.toml).
    """
    uses = {
        item.path: group
        for item in items
        for fixture, group in SHARED.items()
        if fixture in getattr(item, "fixturenames", ())
    }
    groups = {path: uses.get(path, path.relative_to(config.rootpath).as_posix()) for path in {i.path for i in items}}
    for item in items:
        item.add_marker(pytest.mark.xdist_group(groups[item.path]))
    order = {group: number for number, group in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(groups[item.path], len(order)))
