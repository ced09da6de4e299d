"""Actors that Ray ended on purpose are not taken for killed ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from verl_rollout_corr.platform import endings, environment, watchdog
from verl_rollout_corr.platform.watchdog import Watchdog

pytest.importorskip("ray")

TWO_JOBS = """
import os, signal, sys, time
import ray
from verl_rollout_corr.platform import endings, members, watchdog

class Member:
    def __init__(self):
        members.join()

    def pid(self):
        return os.getpid()

@ray.remote(num_cpus=0)
class Part(Member):
    pass

@ray.remote(num_cpus=0)
class Runner(Member):
    def run(self):
        self.part = Part.remote()
        return os.getpid(), ray.get(self.part.pid.remote())

def job(kill):
    runner = Runner.remote()
    own, part = ray.get(runner.run.remote())
    looks(lambda: {own, part} <= set(dog.watched))
    if kill:
        os.kill(part, signal.SIGKILL)
        return looks(lambda: dog.check(time.monotonic()) is not None, said=True)

def looks(condition, said=False, seconds=60.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        finding = dog.check(time.monotonic())
        if said and finding is not None:
            return finding.text
        if condition() and not said:
            return
        assert finding is None, finding.text
        time.sleep(0.2)
    raise AssertionError("it did not happen in time")

def gone():
    return all(one.member.process() is None for one in dog.watched.values())

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
dog = watchdog.Watchdog(__import__("pathlib").Path(os.environ["VERL_CPU_WATCH_DIR"]), stalled_after=0)
job(kill=False)
looks(gone)
until = time.monotonic() + 2 * watchdog.DEAD_AFTER
looks(lambda: time.monotonic() > until)
print("job 0 is over and nothing was said", flush=True)
print("job 1:", job(kill=True).splitlines()[0], flush=True)
"""


def test_the_actors_of_a_job_that_returned_may_end_and_those_of_the_next_are_watched(tmp_path: Path) -> None:
    """With a real Ray: its account of the ends is what is read."""
    done = subprocess.run(
        [sys.executable, "-c", TWO_JOBS],
        env={**os.environ, environment.WATCH_DIR: str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "job 0 is over and nothing was said" in done.stdout, done.stderr[-3000:]
    assert "job 1: ray::" in done.stdout and "died without saying why" in done.stdout, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("cause", "meant"),
    [
        ("", False),
        ("reason: OUT_OF_SCOPE", True),
        ("reason: RAY_KILL", True),
        ("reason: REF_DELETED", True),
        ("reason: WORKER_DIED Worker exit type: SYSTEM_ERROR", False),
        ("Owner worker exit type: INTENDED_SYSTEM_EXIT Worker exit detail: x reason: OWNER_DIED", True),
        ("Owner worker exit type: INTENDED_USER_EXIT reason: OWNER_DIED", True),
        ("Owner worker exit type: SYSTEM_ERROR reason: OWNER_DIED", False),
        ("Worker exit type: INTENDED_SYSTEM_EXIT reason: WORKER_DIED", False),
    ],
)
def test_how_ray_says_it(cause: str, meant: bool) -> None:
    assert endings.is_on_purpose(cause) is meant


def test_without_ray_nothing_was_ended_on_purpose() -> None:
    assert endings.session() is None
    assert endings.ended_on_purpose() == set()


def killed(run: Any, dog: Watchdog) -> int:
    process = run.start(run.IDLE)
    assert dog.check(0.0) is None
    process.kill()
    process.wait()
    assert dog.check(1.0) is None
    return process.pid


AFTER = 1.0 + watchdog.DEAD_AFTER


@pytest.mark.parametrize("ended", ["it", "its parent", "another"])
def test_what_ray_ended_and_what_that_had_started(run: Any, monkeypatch: pytest.MonkeyPatch, ended: str) -> None:
    dog = Watchdog(run.folder)
    pid = killed(run, dog)
    pids = {"it": {pid}, "its parent": {os.getpid()}, "another": {1 << 22}}[ended]
    monkeypatch.setattr(endings, "ended_on_purpose", lambda: pids)
    assert (dog.check(AFTER) is None) is (ended != "another")
    monkeypatch.setattr(endings, "ended_on_purpose", lambda: set())
    assert (dog.check(AFTER + 1.0) is None) is (ended != "another"), "what was said stays"


@pytest.mark.parametrize("later", [None, ("127.0.0.1:2", "01000000")])
def test_the_processes_of_a_ray_that_was_left(run: Any, monkeypatch: pytest.MonkeyPatch, later: Any) -> None:
    """The driver ended its Ray, and may have started another one."""
    monkeypatch.setattr(endings, "session", lambda: ("127.0.0.1:1", "01000000"))
    dog = Watchdog(run.folder)
    killed(run, dog)
    assert dog.check(AFTER) is not None
    monkeypatch.setattr(endings, "session", lambda: later)
    assert dog.check(AFTER + 1.0) is None
