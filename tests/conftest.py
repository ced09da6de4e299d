"""What every test shares: how hard hypothesis tries, and how many processes run the tests.

`HYPOTHESIS_PROFILE=slow` runs thousands of examples per property, and twenty times the seeded batches of tests/oracle
and tests/kernels.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))  # the oracle is imported by name, and importlib mode adds no path

import scheduling

for profile, examples in (("default", 60), ("slow", 3000)):
    settings.register_profile(
        profile, max_examples=examples, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

gc.set_threshold(200_000, 100, 100)  # imports and compositions are a fifth slower with a collector that looks often
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
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest groups begin (scheduling.py)."""
    items[:] = scheduling.in_order(items)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What shares something stays in one process."""
    return scheduling.scheduler(config, log)
