"""Ends a run of which a process died or hangs, and says which one and why. It is a thread of the driver.

Without it such a run would wait forever: V1's trainer asks for the rollouts of a dead engine again and again, a rank
waits for another one in a collective without a time limit, and Ray reports an actor's death only to processes that wait
for that actor.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import psutil

from verl_rollout_corr.platform import endings, environment, members
from verl_rollout_corr.platform.members import Member
from verl_rollout_corr.platform.watched import Watched, circumstances, engine_above, innermost_frames
from verl_rollout_corr.platform.work import Work, is_machinery

PERIOD = 1.0
"""Seconds between two checks."""
DEAD_AFTER = 2.0
"""Seconds for which a process must be gone before it counts as dead: the run may just be ending."""
STALLED_AFTER = 45.0
"""Seconds without any work after which a run counts as hung; so such a run ends within a minute."""
FAREWELL = 10.0
"""Seconds for which, after a death, the driver may still end by itself, with Ray's own report of what happened."""
EXIT_CODE = 1
"""The exit status of a run that the watchdog ended."""


@dataclass(frozen=True)
class Finding:
    """Why the run must end, and for how many seconds the driver may still end by itself."""

    text: str
    farewell: float


class Watchdog:
    """Looks at the members of a run in `folder`; `check` returns why the run must end."""

    def __init__(self, folder: Path, *, stalled_after: float = STALLED_AFTER) -> None:
        self.folder = folder
        self.work = Work(stalled_after)
        self.watched: dict[int, Watched] = {}
        self._engines: dict[int, tuple[Member, int]] = {}

    def check(self, now: float) -> Finding | None:
        """Checks once. Returns None, or what happened, with what helps to find out why."""
        self._look(now)
        death = self.death(now, DEAD_AFTER)
        if death is not None:
            return Finding(death, FAREWELL)
        for watched in self.watched.values():
            cause = watched.stopped(now)
            if cause is not None:
                return Finding("\n".join([cause, *circumstances(watched)]), 0.0)
        self.work.look(now, self._workers())
        return Finding(self._stall(), 0.0) if self.work.stalled() else None

    def _workers(self) -> list[psutil.Process]:
        """Every process that can bring the run forward: also those that are still importing and have not joined."""
        found = [watched.member.process() for watched in self.watched.values()]
        processes = {process.pid: process for process in found if process is not None}
        for process in psutil.Process().children(recursive=True):
            try:
                if not is_machinery(process) and process.status() != psutil.STATUS_ZOMBIE:
                    processes[process.pid] = process
            except psutil.NoSuchProcess:
                continue
        return list(processes.values())

    def _look(self, now: float) -> None:
        """Updates what is known of every process."""
        present = {member.pid: member for member in members.announced(self.folder)}
        for member in present.values():
            engine = engine_above(member)
            if engine is not None:
                self._engines[engine.pid] = (engine, member.pid)
        # An engine is remembered beyond its death, until its worker has left.
        present |= {pid: engine for pid, (engine, worker) in self._engines.items() if worker in present}
        self.watched = {pid: self.watched.get(pid) or Watched(member) for pid, member in present.items()}
        for watched in self.watched.values():
            watched.look(now)

    def death(self, now: float, after: float) -> str | None:
        """The processes that have been gone for so long, in the order of their deaths."""
        dead = [watched for watched in self.watched.values() if watched.dead(now, after)]
        if dead:
            _excuse(dead)
            dead = [watched for watched in dead if not watched.excused]
        if not dead:
            return None
        # If a parent and its child are found dead at once, the parent's death is taken for the cause.
        dead.sort(key=lambda watched: (watched.gone_since or now, watched.member.started))
        cause = (
            f"{dead[0].name} died without saying why: it was killed (kill -9, or by the kernel when memory ran out) or "
            "it crashed"
        )
        others = [f"  gone since: {', '.join(watched.name for watched in dead[1:])}"] if dead[1:] else []
        return "\n".join([cause, *others, *circumstances(dead[0])])

    def last_look(self, now: float) -> str | None:
        """The processes that are gone when the driver ends."""
        self._look(now)
        return self.death(now, 0.0)

    def _stall(self) -> str:
        """The message for a run in which no process works."""
        lines = [
            f"no process of the run has worked for {self.work.window:.0f} s: they wait for each other, or for "
            f"something outside. If that is meant, give {environment.STALL_SECONDS} more seconds, or 0. What each of "
            "them does:"
        ]
        for watched in self.watched.values():
            lines += [f"  {watched.name}:", *(f"    {line}" for line in innermost_frames(watched.member))]
        return "\n".join(lines)


def _excuse(gone: list[Watched]) -> None:
    """Those that Ray ended on purpose, with what they started, and those of a Ray that the driver has left since."""
    session, ended = endings.session(), endings.ended_on_purpose()
    for watched in gone:
        watched.excused = watched.session != session or not ended.isdisjoint({watched.member.pid, *watched.ancestors})


def end_run(folder: Path) -> None:
    """Ends every process of the run, this one last. SIGKILL, since a stopped process reacts to nothing else."""
    doomed = {process.pid: process for process in psutil.Process().children(recursive=True)}
    for member in members.announced(folder):
        process = member.process()
        if process is not None:
            doomed[process.pid] = process
    for process in doomed.values():
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(list(doomed.values()), timeout=3.0)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(EXIT_CODE)


def _say(text: str) -> None:
    # If the message cannot be written, the run must end all the same.
    with contextlib.suppress(OSError, ValueError):
        print(f"[cpu platform] {text}", file=sys.stderr, flush=True)


def _watch(watchdog: Watchdog, over: threading.Event) -> None:
    reported = False
    while not over.wait(PERIOD):
        try:
            finding = watchdog.check(time.monotonic())
        except Exception:  # what it did not expect of one process must not leave the others unwatched
            if not reported:
                _say(
                    "the watchdog could not look at the run; it goes on, but may not see that a process died or hangs "
                    f"while this lasts. Please report it:\n{traceback.format_exc()}"
                )
            reported = True
            continue
        if finding is None:
            continue
        _say(finding.text)
        if not over.wait(finding.farewell):
            _say("the run is ended because of that")
            end_run(watchdog.folder)
        return


_folder: Path | None = None


def start() -> None:
    """Watches the run that this process, the driver, is about to start. A second call does nothing."""
    global _folder
    if _folder is not None:
        return
    stalled_after = environment.seconds(environment.STALL_SECONDS, STALLED_AFTER)
    _folder = Path(tempfile.mkdtemp(prefix="verl-cpu-run-"))
    os.environ[environment.WATCH_DIR] = str(_folder)
    watchdog = Watchdog(_folder, stalled_after=stalled_after)
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(watchdog, over), name="verl-cpu-watchdog", daemon=True)
    # Ray registered its shutdown when it was imported, so this runs before Ray ends the workers.
    atexit.register(_stop, over, thread, watchdog)
    thread.start()


def _stop(over: threading.Event, thread: threading.Thread, watchdog: Watchdog) -> None:
    """Called when the driver ends. If Ray told it of a death, Ray's error does not say which process died, and why."""
    over.set()
    thread.join(timeout=5 * PERIOD)
    report = watchdog.last_look(time.monotonic())
    if report is not None:
        _say(report)
    shutil.rmtree(watchdog.folder, ignore_errors=True)
