"""verl's main programs up to the point before Ray, forked from one process that has imported them (`forked.py`)."""

from __future__ import annotations

import os
from pathlib import Path
from subprocess import CompletedProcess

from forked import Warm

STARTED = 42
"""The exit code of a program that went on to start Ray, or a process group."""

PROGRAMS = (
    "verl.trainer.main_ppo",
    "verl.experimental.one_step_off_policy.main_ppo",
    "verl.experimental.fully_async_policy.fully_async_main",
    "verl.trainer.sft_trainer",
    "verl.trainer.sft_trainer_ray",
    "verl.trainer.main_eval",
    "verl.trainer.main_generation_server",
)
"""Every main program of verl 0.9.1 that Hydra configures."""

POLICY_PROGRAMS = PROGRAMS[:3]
"""Those that train a policy by its rewards."""

COMPLETE = (
    "trainer.device=cpu",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
)
"""What verl's own check of a configuration needs, which comes before Ray too."""

ROOT = Path(__file__).parents[2]


class Programs(Warm):
    """Starts them with the hook, which is loaded by name, so that a test does not depend on the installation."""

    def __init__(self) -> None:
        super().__init__(["hydra_apps.before_ray"], environment())

    def start(self, program: str, *arguments: str, cwd: Path) -> CompletedProcess[str]:
        """`python -m program` with these arguments."""
        return self.run(program, arguments, cwd=cwd)

    def start_without_hook(self, program: str, *arguments: str, cwd: Path) -> CompletedProcess[str]:
        """The same where verl was told of no module, and the hook has left nothing that composing needs. A process in
        which it was never imported is in tests/e2e/test_refusals.py.
        """
        words = [program, *arguments]
        return self.run("hydra_apps.without_hook", words, cwd=cwd, env={"VERL_USE_EXTERNAL_MODULES": ""})


def environment() -> dict[str, str]:
    """The environment of a program with the hook."""
    # The directory of the test run is on the path of `python -m`; a wheel's user has no checkout of verl there.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    hook = "verl_rollout_corr.hooks.plugin"
    ours = {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": hook, "PYTHONPATH": path}
    return {**os.environ, "OMP_NUM_THREADS": "1", **ours}
