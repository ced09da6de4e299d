"""What the watchdog says of processes that die, stop and wait, with real ones and a clock of the test's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from verl_rollout_corr.platform import environment, watchdog, watched
from verl_rollout_corr.platform.watchdog import Finding, Watchdog
from verl_rollout_corr.platform.work import PATIENCE, SHARE


def titled(name: str, code: str) -> str:
    """Code that gives the process a name, as Ray and vLLM do."""
    return f"from setproctitle import setproctitle\nsetproctitle({name!r})\n{code}"


def test_nothing_is_said_of_processes_that_work(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they work is written here: the clock is the test's own, and theirs would not keep up with it."""
    run.start(run.IDLE)
    seconds = 0.0
    monkeypatch.setattr(psutil.Process, "cpu_times", lambda _: SimpleNamespace(user=seconds, system=0.0))
    dog = Watchdog(run.folder)
    long = int(2 * PATIENCE * watchdog.STALLED_AFTER)
    for now in range(0, long, 5):
        assert dog.check(float(now)) is None
        seconds += 5 * 2 * SHARE
    assert any(dog.check(float(now)) is not None for now in range(long, 2 * long, 5)), "they have stopped working"


def test_nothing_is_said_of_a_process_that_left(run: Any) -> None:
    process = run.start("input()")
    dog = Watchdog(run.folder)
    assert dog.check(0.0) is None
    process.wait(timeout=30)
    assert dog.check(10.0) is None
    assert dog.watched == {}


def test_a_killed_process_is_named(run: Any) -> None:
    pytest.importorskip("setproctitle")
    process = run.start(titled("ray::WorkerDict.update_actor", run.IDLE))
    dog = Watchdog(run.folder)
    run.wait_until(lambda: dog.check(0.0) is None and next(iter(dog.watched.values())).title.startswith("ray::"))
    process.kill()
    process.wait()
    assert dog.check(1.0) is None, "it may be on its way out with the run"
    finding = dog.check(1.0 + watchdog.DEAD_AFTER)
    assert finding is not None
    assert finding.farewell > 0, "Ray may have something to say"
    assert finding.text.startswith(
        f"ray::WorkerDict.update_actor (pid {process.pid}) died without saying why: it was killed"
    )
    assert "GiB are free" in finding.text


def test_a_process_that_ray_had_no_use_for_may_die(run: Any) -> None:
    pytest.importorskip("setproctitle")
    process = run.start(titled("ray::IDLE", run.IDLE))
    dog = Watchdog(run.folder)
    run.wait_until(lambda: dog.check(0.0) is None and next(iter(dog.watched.values())).title == "ray::IDLE")
    process.kill()
    process.wait()
    dog.check(1.0)
    assert dog.check(20.0) is None


def test_an_engine_above_its_worker_is_named_first(run: Any) -> None:
    """The engine does not announce itself, its worker does, and dies with it."""
    pytest.importorskip("setproctitle")
    child = (
        "import subprocess, sys, time\nworker = subprocess.Popen([sys.executable, '-c', sys.argv[1]])\ntime.sleep(120)"
    )
    worker = "from verl_rollout_corr.platform import members\nmembers.join()\n" + titled("VLLM::Worker", run.IDLE)
    engine = subprocess.Popen(
        [sys.executable, "-c", titled("VLLM::EngineCore", child), worker],
        env={**os.environ, environment.WATCH_DIR: str(run.folder)},
    )
    run.processes.append(engine)
    dog = Watchdog(run.folder)

    def both_seen() -> bool:
        assert dog.check(0.0) is None
        return {one.title for one in dog.watched.values()} == {"VLLM::EngineCore", "VLLM::Worker"}

    run.wait_until(both_seen)
    (announced,) = [one.member for one in dog.watched.values() if one.member.announced]
    os.kill(engine.pid, signal.SIGKILL)
    os.kill(announced.pid, signal.SIGKILL)
    engine.wait()
    run.wait_until(lambda: announced.process() is None)
    dog.check(1.0)
    finding = dog.check(4.0)
    assert finding is not None
    assert finding.text.splitlines()[0].startswith(f"VLLM::EngineCore (pid {engine.pid}) died")
    assert f"gone since: VLLM::Worker (pid {announced.pid})" in finding.text


def test_a_process_that_ends_while_its_parent_is_asked_for_has_none(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """psutil finds the process, and then does not."""
    run.start(run.IDLE)

    def ended(process: psutil.Process) -> None:
        raise psutil.NoSuchProcess(process.pid)

    monkeypatch.setattr(psutil.Process, "parent", ended)
    dog = Watchdog(run.folder)
    assert dog.check(0.0) is None
    assert len(dog.watched) == 1


class Surprised(Watchdog):
    """Fails at its first looks, and finds something at the last one."""

    looks = 0

    def check(self, now: float) -> Finding | None:
        self.looks += 1
        if self.looks < 4:
            raise PermissionError("a process that may not be looked at")
        return Finding("found", 0.0)


@pytest.mark.parametrize("heard", [True, False])
def test_what_the_watchdog_does_not_expect_is_said_once_and_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], heard: bool
) -> None:
    """Also where standard error is closed."""
    ended: list[Path] = []
    monkeypatch.setattr(watchdog, "PERIOD", 0.001)
    monkeypatch.setattr(watchdog, "end_run", ended.append)
    if not heard:
        closed = (tmp_path / "closed").open("w")
        closed.close()
        monkeypatch.setattr(sys, "stderr", closed)
    watchdog._watch(Surprised(tmp_path), threading.Event())
    assert ended == [tmp_path]
    said = capsys.readouterr().err
    if heard:
        assert said.count("the watchdog could not look at the run; it goes on") == 1
        assert said.count("PermissionError: a process that may not be looked at") == 1
        assert said.endswith("[cpu platform] found\n[cpu platform] the run is ended because of that\n")
    else:
        assert said == ""


def test_a_stopped_process_is_named(run: Any) -> None:
    process = run.start(run.IDLE)
    dog = Watchdog(run.folder)
    dog.check(0.0)
    os.kill(process.pid, signal.SIGSTOP)
    run.wait_until(lambda: dog.check(1.0) is None and next(iter(dog.watched.values())).stopped_since is not None)
    assert dog.check(5.0) is None, "a person may look at it"
    finding = dog.check(1.0 + watched.STOPPED_AFTER)
    assert finding is not None
    assert f"(pid {process.pid}) has been stopped for 10 s" in finding.text
    assert f"kill -CONT {process.pid}" in finding.text


def test_a_process_that_went_on_is_left_alone(run: Any) -> None:
    process = run.start(run.IDLE)
    dog = Watchdog(run.folder)
    os.kill(process.pid, signal.SIGSTOP)
    run.wait_until(lambda: dog.check(1.0) is None and next(iter(dog.watched.values())).stopped_since is not None)
    os.kill(process.pid, signal.SIGCONT)
    run.wait_until(lambda: dog.check(8.0) is None and next(iter(dog.watched.values())).stopped_since is None)
    assert dog.check(12.0) is None


def test_a_run_in_which_nobody_works_has_stalled(run: Any) -> None:
    code = "import threading\ndef no_reply_comes():\n    threading.Event().wait()\nno_reply_comes()"
    process = run.start(code)
    dog = Watchdog(run.folder, stalled_after=20.0)
    # On a machine that the other tests keep busy, it takes four times as long.
    found = ((now, dog.check(float(now))) for now in range(100))
    now, finding = next((now, finding) for now, finding in found if finding is not None)
    assert now in range(20, 81)
    assert finding.text.startswith("no process of the run has worked for 20 s")
    assert "VERL_CPU_STALL_SECONDS" in finding.text
    assert f"(pid {process.pid}):" in finding.text
    assert "no_reply_comes" in finding.text


def test_zero_seconds_switch_the_check_off(run: Any) -> None:
    run.start(run.IDLE)
    dog = Watchdog(run.folder, stalled_after=0.0)
    for now in range(0, 200, 10):
        assert dog.check(float(now)) is None


def test_the_last_lines_of_a_log_are_shown(tmp_path: Path) -> None:
    log = tmp_path / "worker.err"
    log.write_text("\n".join(f"line {i}\n" for i in range(5000)))
    assert watched.last_lines(log, 3) == ["line 4997", "line 4998", "line 4999"]
    assert watched.last_lines(None, 3) == []
    assert watched.last_lines(tmp_path / "absent", 3) == []


DRIVER = """
import os, signal, subprocess, sys, time
from verl_rollout_corr.platform import environment, watchdog
watchdog.FAREWELL = 1.0
watchdog.start()
code = ("from verl_rollout_corr.platform import members; members.join(); "
        # A job in the background of a shell inherits that SIGINT is ignored.
        "import signal, time; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "print('joined', flush=True); time.sleep(120)")
worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
worker.stdout.readline(), other.stdout.readline()
print(worker.pid, other.pid, os.environ[environment.WATCH_DIR], flush=True)
{then}
"""


def runs(pid: int) -> bool:
    """Whether the process is alive; an orphan that nobody has waited for is not."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def drive(then: str) -> tuple[int, str, list[int], Path]:
    """A driver with two workers; returns its exit code, its errors, the workers' ids and the folder of the run."""
    code = textwrap.dedent(DRIVER).format(then=then)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    first, second, folder = done.stdout.split()
    return done.returncode, done.stderr, [int(first), int(second)], Path(folder)


def test_a_driver_that_waits_for_a_dead_worker_is_ended_with_everything() -> None:
    code, errors, (dead, other), folder = drive("time.sleep(2); worker.kill(); worker.wait(); time.sleep(100)")
    assert code == watchdog.EXIT_CODE
    assert f"(pid {dead}) died without saying why" in errors
    assert "the run is ended because of that" in errors
    assert not runs(other)
    assert not folder.exists()


def test_a_driver_that_ends_by_itself_says_who_had_died() -> None:
    """As when Ray tells it of the death: Ray's error names no signal and no log."""
    code, errors, (dead, _), folder = drive("time.sleep(2); worker.kill(); worker.wait(); other.kill(); sys.exit(7)")
    assert code == 7
    assert "died without saying why" in errors
    assert f"(pid {dead})" in errors  # as the cause or as gone since: the two die within one look
    assert not folder.exists()


def test_a_driver_that_ends_well_says_nothing() -> None:
    then = "time.sleep(2); [(one.send_signal(signal.SIGINT), one.wait()) for one in (worker, other)]"
    code, errors, _, folder = drive(then)
    assert code == 0
    assert "[cpu platform]" not in errors
    assert not folder.exists()
