"""FullyAsyncTrainer is a Ray actor of its own: its class travels by value from the process that starts it. Here it
does, without Ray.

One process pickles the class as Ray does, after a preset was resolved there; another one loads it, with the hook or
without.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HOOK = "verl_rollout_corr.hooks.plugin"

SENDER = """
import sys, warnings
warnings.simplefilter("ignore")
import verl
from ray import cloudpickle
from verl.experimental.fully_async_policy.fully_async_trainer import FullyAsyncTrainer
from verl_rollout_corr.hooks import compat
compat.apply_all()  # as a preset does when it is resolved
with open(sys.argv[1], "wb") as file:
    cloudpickle.dump(FullyAsyncTrainer.__ray_metadata__.modified_class, file)
"""

RECEIVER = """
import importlib, sys, warnings
warnings.simplefilter("ignore")
import verl
from ray import cloudpickle
with open(sys.argv[1], "rb") as file:
    trainer_class = cloudpickle.load(file)
from verl.experimental.fully_async_policy.detach_utils import MetricsAggregator
from verl.experimental.fully_async_policy.message_queue import MessageQueueClient
from verl.checkpoint_engine import CheckpointEngineManager
assert trainer_class.__mro__[1].__init__.__globals__["MetricsAggregator"] is MetricsAggregator
def ours(function):
    # Ray wraps every method of an actor and copies its attributes, so only the code tells whose function runs.
    while function is not None:
        if "verl_rollout_corr/hooks" in function.__code__.co_filename:
            return True
        function = getattr(function, "__wrapped__", None)
    return False
for owner, name in (
    (trainer_class, "_update_actor"),
    (trainer_class, "_init_resource_pools"),
    (MetricsAggregator, "add_step_metrics"),
    (MetricsAggregator, "get_aggregated_metrics"),
    (MetricsAggregator, "reset"),
    (MessageQueueClient, "put_sample"),
    (MessageQueueClient, "get_sample"),
    (CheckpointEngineManager, "update_weights"),
    (sys.modules["verl.experimental.separation.ray_trainer"], "compute_advantage"),
    (importlib.import_module("verl.trainer.ppo.rollout_corr_helper"), "apply_bypass_mode"),
):
    print(name, ours(getattr(owner, name)))
"""


Run = Callable[..., str]


@pytest.fixture(scope="module")
def python(bare: Any) -> Run:
    """Runs code in a process of its own, which imports verl and its plug-ins, and answers what it printed."""

    def run(code: str, *arguments: str, hook: bool) -> str:
        env = {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": HOOK if hook else ""}
        done = bare.python(code, *arguments, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def seams(output: str) -> dict[str, bool]:
    return {
        name: flag == "True" for name, flag in (line.split() for line in output.splitlines() if len(line.split()) == 2)
    }


@pytest.fixture(scope="module")
def pickled(python: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The class as a process with a preset sends it."""
    file = tmp_path_factory.mktemp("class") / "class.pickle"
    python(SENDER, str(file), hook=True)
    return file


@pytest.mark.parametrize("hook", [True, False], ids=["with_the_hook", "without_the_hook"])
def test_the_hook_is_on_where_the_trainer_lives_and_nowhere_else(python: Run, pickled: Path, hook: bool) -> None:
    """Without the hook there the class must be verl's own, so that the actor sees a batch that was not corrected and
    refuses it.
    """
    found = seams(python(RECEIVER, str(pickled), hook=hook))
    assert len(found) == 10
    assert set(found.values()) == {hook}, found
