"""Starts one real run of verl in a process group of its own, waits for it, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from e2e.settings import MODULES, RECIPE

LOCK_VARIABLE = "ROLLOUT_CORR_RUN_LOCK"
"""The file that a run holds while it lives; with the number of another place behind it, where there are several."""

RUNS_AT_ONCE = int(os.environ.get("ROLLOUT_CORR_RUNS_AT_ONCE", "1"))
"""A start has processes that wait for each other: two at once take less time than one after the other, and up to 8 GiB
each.
"""

_MARK = "ROLLOUT_CORR_RUN_MARK"
_ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "RAY_DEDUP_LOGS": "0",
    # Ray would start as many idle workers as the run says it has cores.
    "RAY_prestart_worker_first_driver": "0",
    "PYTHONUNBUFFERED": "1",
    "HYDRA_FULL_ERROR": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Finished:
    """A run that ended. `log` is all that it wrote; `records` has what the actor's loss was given (e2e_recorder.py)."""

    name: str
    command: list[str]
    folder: Path
    returncode: int
    seconds: float
    log: str = field(repr=False)

    @property
    def records(self) -> Path:
        return self.folder / "records"

    def tail(self, lines: int = 60) -> str:
        """The end of the log, for the message of a failing test."""
        return "\n".join(self.log.splitlines()[-lines:])


@contextlib.contextmanager
def a_place() -> Iterator[None]:
    """Waits until fewer runs of this harness are alive than RUNS_AT_ONCE."""
    first = os.environ.get(LOCK_VARIABLE) or str(Path(tempfile.gettempdir()) / "rollout_corr_run.lock")
    with contextlib.ExitStack() as opened:
        names = [first, *(f"{first}.{number}" for number in range(1, RUNS_AT_ONCE))]
        locks = [opened.enter_context(open(name, "a")) for name in names]
        while not any(_taken(lock) for lock in locks):
            time.sleep(0.5)
        yield


def _taken(lock: IO[str]) -> bool:
    """Takes it, unless another process has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def environment(
    extra: Mapping[str, str | None], *, mark: str, ray_dir: str, first_on_path: Path | None
) -> dict[str, str]:
    """What the run sees: ours, then `extra`, where None takes a variable away."""
    # BLAS libraries are told about the kernel of another machine by some hosts.
    values = {name: value for name, value in os.environ.items() if not name.startswith(("OPENBLAS_", "PYTEST_"))}
    values |= _ENVIRONMENT | {_MARK: mark, "RAY_TMPDIR": ray_dir}
    paths = [str(first_on_path or ""), str(RECIPE), str(MODULES), os.environ.get("PYTHONPATH", "")]
    values["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    for name, value in extra.items():
        if value is None:
            values.pop(name, None)
        else:
            values[name] = value
    return values


def descendants(mark: str) -> list[int]:
    """The living processes of one run: they carry its mark in their environment, whoever their parent is."""
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def _end(mark: str, seconds: float) -> None:
    """Ends what is left of a run, gently first."""
    deadline = time.monotonic() + seconds
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for pid in descendants(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sign)
        while descendants(mark) and time.monotonic() < deadline:
            time.sleep(0.2)


def launch(
    name: str,
    folder: Path,
    arguments: Sequence[str],
    *,
    module: str = "verl.trainer.main_ppo",
    env: Mapping[str, str | None] | None = None,
    timeout: float = 3600.0,
    first_on_path: Path | None = None,
    meanwhile: Callable[[str, Path], None] | None = None,
) -> Finished:
    """Runs `python -m module arguments` in `folder` and returns when it ended.

    `meanwhile` gets the run's mark and the path of its log and is called every half second while the run lives. After
    `timeout` seconds, far more than a run takes on a busy machine, it is ended, with return code -9.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark, ray_dir = uuid.uuid4().hex, tempfile.mkdtemp(prefix="rc")  # short: Ray puts sockets into it
    command = [sys.executable, "-m", module, *arguments]
    log = folder / "log.txt"
    with a_place(), log.open("wb") as output:
        started = time.monotonic()
        run = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(env or {}, mark=mark, ray_dir=ray_dir, first_on_path=first_on_path),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            while run.poll() is None and time.monotonic() - started < timeout:
                if meanwhile is not None:
                    meanwhile(mark, log)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    run.wait(0.5)
            if run.poll() is None:
                output.write(f"\n[e2e] ended after {timeout:.0f} s\n".encode())
                os.killpg(run.pid, signal.SIGKILL)
                run.wait()
        finally:
            seconds = time.monotonic() - started
            _end(mark, seconds=15)
            shutil.rmtree(ray_dir, ignore_errors=True)
    return Finished(name, command, folder, run.returncode, seconds, log.read_text(errors="replace"))
