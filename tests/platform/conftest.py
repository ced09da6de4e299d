"""Real processes that join a run, for the tests of who is in it and who died.

This folder has no __init__.py: tests/ is on the path, and a package `platform` there would hide the standard library's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from verl_rollout_corr.platform import environment

JOIN = "from verl_rollout_corr.platform import members\nmembers.join()\nprint('joined', flush=True)\n"


class Run:
    """A folder and the processes that joined in it."""

    IDLE = "import time\ntime.sleep(120)"
    BUSY = "while True: pass"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, code: str) -> subprocess.Popen[str]:
        """A Python process that joins and then executes `code`; returns when it has joined."""
        process = subprocess.Popen(
            [sys.executable, "-c", JOIN + code],
            env={**os.environ, environment.WATCH_DIR: str(self.folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "joined\n"
        return process

    @staticmethod
    def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
        """Waits for what another process does."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it did not happen in time"
            time.sleep(0.05)

    def end(self) -> None:
        """Kills the processes and everything below them."""
        for process in self.processes:
            try:
                family = psutil.Process(process.pid).children(recursive=True)
            except psutil.NoSuchProcess:
                family = []
            for child in family:
                child.kill()
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run without processes."""
    folder = tmp_path / "run"
    folder.mkdir()
    one = Run(folder)
    yield one
    one.end()
