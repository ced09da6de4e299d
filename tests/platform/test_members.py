"""Who is in a run: processes announce themselves, leave when they end by themselves, and stay announced when killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from verl_rollout_corr.platform import environment, members
from verl_rollout_corr.platform.members import Member


@pytest.fixture
def member(run: Any) -> Member:
    """A process that has joined and waits."""
    process = run.start(run.IDLE)
    (found,) = members.announced(run.folder)
    assert found.pid == process.pid
    return found


def test_a_process_that_ends_by_itself_leaves(run: Any) -> None:
    run.start("").wait(timeout=30)
    assert members.announced(run.folder) == []


def test_an_exception_is_an_end_by_itself(run: Any) -> None:
    """Python, and then Ray, says what happened: the watchdog need not."""
    assert run.start("raise SystemExit(3)").wait(timeout=30) == 3
    assert members.announced(run.folder) == []


def test_a_killed_process_stays_announced_and_is_not_found(run: Any, member: Member) -> None:
    assert member.process() is not None
    os.kill(member.pid, signal.SIGKILL)
    run.wait_until(lambda: member.process() is None)
    assert [one.pid for one in members.announced(member.folder)] == [member.pid]


def test_another_process_with_the_same_id_is_not_the_member(member: Member) -> None:
    earlier = Member(member.pid, member.started - 60.0, member.folder)
    assert earlier.process() is None


def test_a_member_writes_its_stacks_when_asked(run: Any, member: Member) -> None:
    os.kill(member.pid, members.STACK_SIGNAL)
    run.wait_until(lambda: "File" in member.stack_file.read_text())
    assert psutil.pid_exists(member.pid)


def test_a_forked_child_does_not_take_its_parent_out(run: Any) -> None:
    code = "import os\npid = os.fork()\nif pid:\n  os.waitpid(pid, 0)\n  print('waited', flush=True)\n  " + run.IDLE
    process = run.start(code.replace("\ntime", "\n  time"))
    assert process.stdout.readline() == "waited\n"
    assert [one.pid for one in members.announced(run.folder)] == [process.pid]


def test_without_a_run_nothing_is_announced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No folder, and one that the end of the run has removed."""
    monkeypatch.delenv(environment.WATCH_DIR, raising=False)
    members.join()
    monkeypatch.setenv(environment.WATCH_DIR, str(tmp_path / "removed"))
    members.join()
    assert not (tmp_path / "removed").exists()
