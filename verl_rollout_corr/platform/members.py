"""The processes of a run: each announces itself in a folder that all know, and removes that when it ends normally."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from verl_rollout_corr.platform import environment

STACK_SIGNAL = signal.SIGUSR2
"""The signal on which a member writes the stacks of its threads to its file. It is sent to members only: in other
processes its default is to end the process.
"""

_joined: tuple[int, IO[str]] | None = None


@dataclass(frozen=True)
class Member:
    """A process of the run. The time of its start tells it from a later process with the same id.

    `announced` is False for a process that did not join by itself: it knows no STACK_SIGNAL.
    """

    pid: int
    started: float
    folder: Path
    announced: bool = True

    @property
    def stack_file(self) -> Path:
        """Where the process writes its stacks when it gets STACK_SIGNAL."""
        return self.folder / f"{self.pid}.stacks"

    def process(self) -> psutil.Process | None:
        """The living process, or None."""
        try:
            process = psutil.Process(self.pid)
            # The kernel keeps the start in clock ticks; psutil adds the time of boot, which may be adjusted by a
            # little.
            if abs(process.create_time() - self.started) > 2.0 or process.status() == psutil.STATUS_ZOMBIE:
                return None
        except psutil.NoSuchProcess:
            return None
        return process


def _entry(folder: Path, pid: int) -> Path:
    return folder / f"{pid}.member"


def join() -> None:
    """Announces this process in the folder of its run, if it has one. A second call does nothing."""
    global _joined
    folder = os.environ.get(environment.WATCH_DIR)
    pid = os.getpid()
    if not folder or (_joined is not None and _joined[0] == pid) or not Path(folder).is_dir():
        return
    member = Member(pid, psutil.Process(pid).create_time(), Path(folder))
    # The file stays open: the handler of a signal cannot open one.
    stacks = member.stack_file.open("w")
    _joined = (pid, stacks)
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    atexit.register(leave, Path(folder), pid)
    _entry(member.folder, pid).write_text(repr(member.started))


def leave(folder: Path, pid: int) -> None:
    """Removes the announcement, because the process ends normally. In a forked child it does nothing."""
    if os.getpid() == pid:
        _entry(folder, pid).unlink(missing_ok=True)


def announced(folder: Path) -> list[Member]:
    """The processes that have joined and not left."""
    members: list[Member] = []
    for entry in folder.glob("*.member"):
        try:
            text = entry.read_text()
        except FileNotFoundError:
            continue
        if text:
            members.append(Member(int(entry.stem), float(text), folder))
    return members
