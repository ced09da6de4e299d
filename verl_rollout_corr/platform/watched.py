"""What the watchdog knows of one process of a run, and what it can find out about a process that died or hangs."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from verl_rollout_corr.platform import endings, members
from verl_rollout_corr.platform.members import Member

STOPPED_AFTER = 10.0
"""Seconds for which a process must be stopped: a person may stop it for a moment to look at it."""


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
        """Whether it is gone, and was not meant to end. Ray ends idle processes by itself, which is not a death."""
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


def engine_above(member: Member) -> Member | None:
    """The engine of vLLM above one of its workers: it imports nothing of verl, so it cannot announce itself."""
    process = member.process()
    try:
        parent = process.parent() if process is not None else None
        if parent is None or not _title(parent).startswith("VLLM::"):
            return None
        return Member(parent.pid, parent.create_time(), member.folder, announced=False)
    except psutil.NoSuchProcess:
        return None


def circumstances(watched: Watched) -> list[str]:
    """Details that may help to find out why."""
    memory = psutil.virtual_memory()
    lines = [f"  memory: {memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB are free now"]
    log = last_lines(watched.log, 8)
    if log:
        lines += [f"  its last lines, in {watched.log}:", *(f"    {line}" for line in log)]
    return lines


def innermost_frames(member: Member, count: int = 4) -> list[str]:
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
