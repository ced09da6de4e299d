"""What counts as work, and when a run has stalled, with processes of the test's own making."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from verl_rollout_corr.platform.work import IDLE_SHARE, Work, is_machinery

Times = namedtuple("Times", "user system")


class Process:
    """As much of psutil.Process as Work reads."""

    def __init__(self, pid: int, status: str = psutil.STATUS_SLEEPING) -> None:
        self.pid = pid
        self.seconds = 0.0
        self.now = status
        self.gone = False

    def cpu_times(self) -> Times:
        if self.gone:
            raise psutil.NoSuchProcess(self.pid)
        return Times(self.seconds / 2, self.seconds / 2)

    def status(self) -> str:
        return self.now


def stalls(work: Work, processes: list[Any], seconds: int, each: float = 0.0) -> list[int]:
    """The seconds at which the run counts as stalled, if every process uses `each` CPU seconds per second."""
    found: list[int] = []
    for now in range(seconds + 1):
        for process in processes:
            process.seconds += each
        work.look(float(now), processes)
        if work.stalled(float(now)):
            found.append(now)
    return found


def test_idle_processes_stall_after_the_window() -> None:
    assert stalls(Work(10.0), [Process(1), Process(2)], 12) == [10, 11, 12]


def test_what_polling_costs_is_no_work_and_what_training_costs_is() -> None:
    assert stalls(Work(10.0), [Process(1)], 12, each=0.5 * IDLE_SHARE) == [10, 11, 12]
    assert stalls(Work(10.0), [Process(1)], 40, each=2 * IDLE_SHARE) == []


def test_work_that_is_long_past_does_not_count() -> None:
    work, process = Work(10.0), Process(1)
    assert stalls(work, [process], 20, each=1.0) == []
    for now in range(21, 30):
        work.look(float(now), [process])
        assert not work.stalled(float(now))
    work.look(31.0, [process])
    assert work.stalled(31.0)


@pytest.mark.parametrize("status", [psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP])
def test_a_process_that_waits_for_a_core_or_a_disk_wants_to_work(status: str) -> None:
    """Others may keep the machine busy."""
    assert stalls(Work(10.0), [Process(1, status)], 40) == []


def test_a_process_that_comes_or_goes_is_progress() -> None:
    work, first, second = Work(10.0), Process(1), Process(2)
    assert stalls(work, [first], 9) == []
    for now, processes in [(10, [first, second]), (19, [first, second])]:
        work.look(float(now), processes)
        assert not work.stalled(float(now))
    second.gone = True
    work.look(20.0, [first, second])
    assert not work.stalled(20.0)
    work.look(30.0, [first])
    assert work.stalled(30.0)


def test_nobody_is_not_stalled_and_zero_switches_it_off() -> None:
    assert stalls(Work(10.0), [], 40) == []
    assert stalls(Work(0.0), [Process(1)], 40) == []


@pytest.fixture
def raylet() -> Iterator[psutil.Process]:
    """A process with the command line of one of Ray's own."""
    script = [sys.executable, "-c", "import time; time.sleep(60)", "/opt/ray/core/src/ray/raylet/raylet"]
    process = subprocess.Popen(script)
    while not psutil.Process(process.pid).cmdline():  # between fork and exec there is none
        time.sleep(0.01)
    yield psutil.Process(process.pid)
    process.kill()
    process.wait()


def test_rays_own_processes_are_told_apart(raylet: psutil.Process) -> None:
    assert is_machinery(raylet)
    assert not is_machinery(psutil.Process(os.getpid()))
