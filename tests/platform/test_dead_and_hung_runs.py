"""Real runs of which a process dies or hangs: each ends within a minute, and its log names the process and the cause.

A killed actor worker, of which Ray tells the trainer, is in the end-to-end tests. These are the runs that would be
silent for ever.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

TRAIN = Path(__file__).resolve().parents[2] / "recipes" / "tiny_cpu" / "train.py"
START_UP = 420.0
A_MINUTE = 60.0
TIDYING = 30.0
"""What the processes of a run may take to end after the watchdog has spoken, on a machine that is busy."""
BUSY_MACHINE = 150.0
"""How much longer it takes to be sure that nobody works, where something else keeps every core busy."""


class Training:
    """A run of the recipe that goes on until something happens to it."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log.txt"
        self.screen = (folder / "screen.txt").open("w")
        words = [sys.executable, str(TRAIN), "--run", str(folder), "--preset", "none", "--steps", "5000"]
        self.process = subprocess.Popen(words, stdout=self.screen, stderr=subprocess.STDOUT)

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait_for_a_step(self) -> None:
        end = time.monotonic() + START_UP
        while not re.search(r"\bstep:2 - ", self.text()):
            assert self.process.poll() is None, self.text()[-3000:]
            assert time.monotonic() < end, self.text()[-3000:]
            time.sleep(0.5)

    def find(self, title: str) -> psutil.Process:
        """The process of the run whose title starts so."""
        titles: list[str] = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                words = process.cmdline()
            except psutil.NoSuchProcess:
                continue
            titles += words[:1]
            if words and words[0].startswith(title):
                return process
        raise AssertionError(f"no process {title}: {titles}")

    def end(self) -> None:
        for process in psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []:
            process.kill()
        self.process.kill()
        self.process.wait()
        self.screen.close()


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    """A run that has trained for two steps."""
    one = Training(tmp_path)
    try:
        one.wait_for_a_step()
        yield one
    finally:
        one.end()


@pytest.mark.parametrize(
    ("title", "number", "said"),
    [
        ("VLLM::EngineCore", signal.SIGKILL, r"VLLM::EngineCore \(pid {pid}\) died without saying why: it was killed"),
        ("ray::WorkerDict", signal.SIGSTOP, r"ray::WorkerDict\S* \(pid {pid}\) has been stopped for 1\d s"),
        # It does not import verl, so nobody watches it: what is seen is that everybody else waits.
        ("ray::SimpleStorageUnit", signal.SIGSTOP, r"no process of the run has worked for 45 s"),
    ],
)
def test_the_run_ends_with_the_cause(training: Training, title: str, number: signal.Signals, said: str) -> None:
    victim = training.find(title)
    family = psutil.Process(training.process.pid).children(recursive=True)
    os.kill(victim.pid, number)
    started = time.monotonic()
    code = training.process.wait(timeout=A_MINUTE + TIDYING + BUSY_MACHINE)
    assert code == 1
    text = training.text()
    found = re.search(r"\[cpu platform\] " + said.format(pid=victim.pid), text)
    assert found, text[-3000:]
    # verl may notice a death by itself, if a request fails of it: then the run ends before the watchdog ends it.
    assert "[cpu platform] the run is ended because of that" in text or ("died" in said and "Traceback" in text)
    if "no process" not in said or psutil.getloadavg()[0] < psutil.cpu_count():
        assert time.monotonic() - started < A_MINUTE + TIDYING
    _, alive = psutil.wait_procs(family, timeout=10)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
