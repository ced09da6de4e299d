"""Ends a run of which a process died or hangs, and says which one and why. It is a thread of the driver.

Without it such a run would wait for ever: V1's trainer asks for the rollouts of a dead engine again and again, a rank
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
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from verl_rollout_corr.platform import endings, environment, members
from verl_rollout_corr.platform.members import Member
from verl_rollout_corr.platform.work import Work, is_machinery

PERIOD = 1.0
"""Seconds between two checks."""
DEAD_AFTER = 2.0
"""Seconds for which a process must be gone before it counts as dead: the run may just be ending."""
STOPPED_AFTER = 10.0
"""Seconds for which a process must be stopped: a person may stop it for a moment to look at it."""
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


@dataclass
class Watched:
    """What is known of a member of the run; `title` and `log` are kept for when it is dead.

    `session` is the Ray that it was first seen in, `ancestors` the processes above it, and `excused` says that it was
    meant to end.
    """

    member: Member
    session: object = field(default_factory=lambda: endings.session())
    ancestors: frozenset[int] = frozenset()
    excused: bool = False
    title: str = "a process that had not started up"
    log: Path | None = None
    gone_since: float | None = None
    stopped_since: float | None = None

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"{self.title} (pid {self.member.pid})"

    def look(self, now: float) -> None:
        """Updates what is known."""
        process = self.member.process()
        if process is None:
            self.gone_since = self.gone_since or now
            return
        try:
            self.title = _title(process) or self.title
            self.log = self.log or _standard_error_of(process)
            self.ancestors = self.ancestors or frozenset(parent.pid for parent in process.parents())
            stopped = process.status() == psutil.STATUS_STOPPED
        except psutil.NoSuchProcess:
            return
        self.stopped_since = (self.stopped_since or now) if stopped else None

    def dead(self, now: float, after: float) -> bool:
        """Whether it is gone, without having left. Ray ends its idle processes as it likes."""
        gone = self.gone_since is not None and now - self.gone_since >= after
        return gone and not self.excused and not self.title.startswith("ray::IDLE")

    def stopped(self, now: float) -> str | None:
        """The message about a process that is stopped for too long."""
        if self.stopped_since is not None and now - self.stopped_since >= STOPPED_AFTER:
            duration = now - self.stopped_since
            return (
                f"{self.name} has been stopped for {duration:.0f} s (SIGSTOP, Ctrl-Z or a debugger) and everything "
                f"waits for it; kill -CONT {self.member.pid} would let it go on"
            )
        return None


def _title(process: psutil.Process) -> str:
    """Ray and vLLM write what a process does into its command line."""
    words = process.cmdline()
    return words[0].strip() if words else ""


def _standard_error_of(process: psutil.Process) -> Path | None:
    """The file that the process logs to, where the system tells."""
    try:
        target = Path(os.readlink(f"/proc/{process.pid}/fd/2"))
    except OSError:
        return None
    return target if target.is_file() else None


def last_lines(log: Path | None, count: int) -> list[str]:
    """The last lines of a log that are not empty."""
    if log is None or not log.is_file():
        return []
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 16384))
        lines = file.read().decode(errors="replace").splitlines()
    return [line for line in lines if line.strip()][-count:]


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
                return Finding("\n".join([cause, *_circumstances(watched)]), 0.0)
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
            engine = _engine_above(member)
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
        return "\n".join([cause, *others, *_circumstances(dead[0])])

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
            lines += [f"  {watched.name}:", *(f"    {line}" for line in _innermost_frames(watched.member))]
        return "\n".join(lines)


def _excuse(gone: list[Watched]) -> None:
    """Those that Ray ended on purpose, with what they started, and those of a Ray that the driver has left since."""
    session, ended = endings.session(), endings.ended_on_purpose()
    for watched in gone:
        watched.excused = watched.session != session or not ended.isdisjoint({watched.member.pid, *watched.ancestors})


def _engine_above(member: Member) -> Member | None:
    """The engine of vLLM above one of its workers: it imports nothing of verl, so it cannot announce itself."""
    process = member.process()
    try:
        parent = process.parent() if process is not None else None
        if parent is None or not _title(parent).startswith("VLLM::"):
            return None
        return Member(parent.pid, parent.create_time(), member.folder, announced=False)
    except psutil.NoSuchProcess:
        return None


def _circumstances(watched: Watched) -> list[str]:
    """Details that may help to find out why."""
    memory = psutil.virtual_memory()
    lines = [f"  memory: {memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB are free now"]
    log = last_lines(watched.log, 8)
    if log:
        lines += [f"  its last lines, in {watched.log}:", *(f"    {line}" for line in log)]
    return lines


def _innermost_frames(member: Member, count: int = 4) -> list[str]:
    """The stack of a process's main thread, as the process itself writes it."""
    if not member.announced:
        return ["it cannot say"]
    try:
        os.kill(member.pid, members.STACK_SIGNAL)
    except ProcessLookupError:
        return ["it is gone"]
    for _ in range(10):
        time.sleep(0.1)
        text = member.stack_file.read_text() if member.stack_file.exists() else ""
        # faulthandler writes the current thread last: the one that handles signals, which is the main thread.
        frames = text.rpartition("Current thread")[2].splitlines()[1:]
        if frames:
            return [frame.strip() for frame in frames[:count]]
    return ["it does not answer"]


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
