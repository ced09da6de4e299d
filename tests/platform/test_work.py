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

from verl_rollout_corr.platform.work import SHARE, Work, is_machinery, machine_times

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


class Machine:
    """Two cores of which a share is idle."""

    def __init__(self, idle: float) -> None:
        self.share = idle
        self.seconds = 0.0

    def __call__(self) -> tuple[float, float]:
        self.seconds += 2.0
        return self.share * self.seconds, self.seconds


def stalls(
    processes: list[Any], seconds: int, *, each: float = 0.0, idle: float = 0.9, window: float = 10.0
) -> list[int]:
    """The seconds at which the run counts as stalled, if every process uses `each` CPU seconds per second."""
    work = Work(window, machine=Machine(idle))
    found: list[int] = []
    for now in range(seconds + 1):
        for process in processes:
            process.seconds += each
        work.look(float(now), processes)
        if work.stalled():
            found.append(now)
    return found


def test_idle_processes_stall_after_the_window() -> None:
    assert stalls([Process(1), Process(2)], 12) == [10, 11, 12]


def test_what_asking_costs_is_no_work_in_any_number_of_processes_and_what_training_costs_is() -> None:
    assert stalls([Process(pid) for pid in range(20)], 12, each=0.5 * SHARE) == [10, 11, 12]
    assert stalls([Process(1)], 60, each=2 * SHARE) == []


def test_one_process_that_works_is_enough() -> None:
    worker = Process(2)
    work = Work(10.0, machine=Machine(0.5))
    for now in range(60):
        worker.seconds += 0.5
        work.look(float(now), [Process(1), worker])  # type: ignore[list-item]
        assert not work.stalled()


def test_work_that_is_long_past_does_not_count() -> None:
    process = Process(1)
    work = Work(10.0, machine=Machine(0.9))
    found: list[int] = []
    for now in range(41):
        process.seconds += now < 20
        work.look(float(now), [process])  # type: ignore[list-item]
        if work.stalled():
            found.append(now)
    # At 28 the window still holds one second of work, which is a tenth of it.
    assert found == list(range(29, 41))


def test_on_a_machine_that_others_keep_busy_it_takes_longer_to_be_sure() -> None:
    assert stalls([Process(1)], 42, idle=0.0) == [40, 41, 42]
    assert stalls([Process(1)], 60, idle=0.0, each=2 * SHARE) == []


def test_a_process_that_waits_for_a_disk_wants_to_work() -> None:
    assert stalls([Process(1, psutil.STATUS_DISK_SLEEP)], 60) == []


def test_a_process_that_comes_or_goes_is_progress() -> None:
    first, second = Process(1), Process(2)
    work = Work(10.0, machine=Machine(0.9))
    found: list[int] = []
    for now in range(41):
        second.gone = now >= 15
        work.look(float(now), [first, second] if now >= 5 else [first])  # type: ignore[list-item]
        if work.stalled():
            found.append(now)
    # Nothing at 10, for one came at 5; at 15 for 10 seconds of two idle ones, but one goes then; and 10 seconds later.
    assert found == list(range(25, 41))


def test_nobody_is_not_stalled_and_zero_switches_it_off() -> None:
    assert stalls([], 60) == []
    assert stalls([Process(1)], 60, window=0.0) == []


def test_the_machine_has_idle_and_other_seconds() -> None:
    idle, total = machine_times()
    assert 0 < idle < total


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
