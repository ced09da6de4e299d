"""verl's main programs as `python -m` starts them, each in a process forked from one that has imported verl already.

The import costs seconds, and is the same for every program. Ray and torch.distributed are replaced by an exit: a run
that is not refused ends there with the code `STARTED`. Run as a program, this file is the process that forks.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class Done:
    """How a program ended."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def started(self) -> bool:
        return self.returncode == STARTED


class Warm:
    """The process that forks; closes with the block."""

    def __init__(self, hook: bool) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "VERL_USE_EXTERNAL_PLUGINS": "none"}
        environment["VERL_USE_EXTERNAL_MODULES"] = "verl_rollout_corr.hooks.plugin" if hook else ""
        root = str(Path(__file__).parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, program: str, *arguments: str, cwd: Path) -> Done:
        """Runs `python -m program` with these arguments."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([program, arguments, str(cwd)]) + "\n")
        self._process.stdin.flush()
        return Done(*json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()


@contextlib.contextmanager
def warm(hook: bool = True) -> Iterator[Warm]:
    process = Warm(hook)
    try:
        yield process
    finally:
        process.close()


def _started(*_: Any, **__: Any) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(STARTED)


def _import_programs() -> None:
    import importlib
    import warnings

    warnings.simplefilter("ignore")
    import ray
    import verl.utils.distributed
    from hydra.core.plugins import Plugins

    for program in PROGRAMS:
        importlib.import_module(program)
    Plugins.instance()
    ray.init = _started
    verl.utils.distributed.initialize_global_process_group = _started


def _run(program: str, arguments: list[str], cwd: str) -> None:
    """In the fork: what `python -m` does."""
    import runpy

    os.chdir(cwd)
    sys.argv = [program, *arguments]
    sys.modules.pop(program)
    runpy.run_module(program, run_name="__main__", alter_sys=True)


def _fork(program: str, arguments: list[str], cwd: str) -> list[Any]:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            code = 0
            try:
                _run(program, arguments, cwd)
            except SystemExit as exit_:
                code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
                if isinstance(exit_.code, str):
                    print(exit_.code, file=sys.stderr)
            except BaseException:
                import traceback

                traceback.print_exc()
                code = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        for file in (out, err):
            file.seek(0)
        return [os.waitstatus_to_exitcode(status), out.read(), err.read()]


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _import_programs()
    for line in sys.stdin:
        answers.write(json.dumps(_fork(*json.loads(line))) + "\n")
        answers.flush()
