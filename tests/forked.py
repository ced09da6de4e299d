"""Programs of verl, each in a process of its own, forked from one that has imported what takes most of their time.

A `Warm` process imports once. Each program that it forks has its own environment, directory, arguments, output and exit
code, as `python -m MODULE` would give it, and inherits the imports and nothing else.

    with Warm(BARE) as warm:                   # everything that verl imports, and neither verl nor this package
        done = warm.run("verl.trainer.main_ppo", ["+rollout_corr=k3_rs"], cwd=folder)
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WITHOUT_VLLM = ("torch", "ray", "transformers", "tensordict", "hydra", "pandas", "datasets", "transfer_queue", "peft")
BARE = (*WITHOUT_VLLM, "vllm")
"""What verl's imports take most of their time for. A program forked after them imports verl, and its plug-ins, anew."""
SECONDS = 900.0
"""A program that has not ended by then is killed. They take seconds; a machine may be busy with other things."""


class Warm:
    """A process that has imported these modules with this environment, and forks a program for each `run`."""

    def __init__(self, modules: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            env=None if env is None else dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def run(
        self,
        module: str,
        arguments: Sequence[Any],
        *,
        cwd: Path,
        env: Mapping[str, str | None] | None = None,
        first_on_path: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """`python -m module` with these arguments. `env` changes the environment of the warm process, where None
        takes a variable away.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        words = [str(word) for word in arguments]
        with tempfile.TemporaryDirectory() as folder:
            request = {
                "module": module,
                "arguments": words,
                "cwd": str(cwd),
                "env": dict(env or {}),
                "first_on_path": None if first_on_path is None else str(first_on_path),
                "output": folder,
            }
            cwd.mkdir(parents=True, exist_ok=True)
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            assert answer, "the warm process died"
            out, err = (Path(folder, name).read_text(errors="replace") for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess([module, *words], int(answer), out, err)

    def python(
        self, code: str, *arguments: Any, env: Mapping[str, str | None] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """`python -c code` with these arguments."""
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "code_of_a_test.py").write_text(textwrap.dedent(code))
            return self.run("code_of_a_test", arguments, cwd=Path(folder), env=env)

    def __enter__(self) -> Warm:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.__exit__(None, None, None)  # closes its pipes, which ends it, and waits


def _serve() -> None:
    """The warm process. Its answers go to what was its standard output; what imports print goes nowhere."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # A pytest that started it may have been interrupted, and must not take it, or what it forks, along half-way.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")  # verl warns of every engine that is not installed
    gc.set_threshold(200_000, 100, 100)  # imports are a fifth slower with a collector that looks often
    for name in sys.argv[1:]:
        importlib.import_module(name)
    warnings.resetwarnings()
    gc.collect()
    gc.freeze()  # else the collector of each forked process writes to, and so copies, all that was imported
    for line in sys.stdin:
        answers.write(f"{_forked(json.loads(line))}\n")
        answers.flush()
    os._exit(0)  # what it imported would take seconds to be tidied up


def _forked(request: dict[str, Any]) -> int:
    child = os.fork()
    if child == 0:
        _become(request)
    watched = os.pidfd_open(child)
    ended, _, _ = select.select([watched], [], [], SECONDS)
    os.close(watched)
    if not ended:
        os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _become(request: dict[str, Any]) -> None:
    """The forked process: never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(Path(request["output"], name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for name, value in request["env"].items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
        os.chdir(request["cwd"])
        sys.path[0] = request["cwd"]  # where `python -m` puts it; the directory of this file stood there
        if request["first_on_path"] is not None:
            sys.path.insert(0, request["first_on_path"])
        importlib.invalidate_caches()
        try:
            sys.argv = [request["module"], *request["arguments"]]  # whose first word runpy replaces
            warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # imported before: on purpose
            runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
