"""Whether the processes of a run do anything."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psutil

SHARE = 0.1
"""A share of a core. A process that only waits, and asks another one now and then, uses less; one that works, more."""

SATURATED = 0.1
"""If a smaller share of the machine is idle, a process may wait for a core for any length of time."""

PATIENCE = 4.0
"""How many windows without work it takes on such a machine to be sure."""

_MACHINERY = ("raylet", "gcs_server", "log_monitor.py", "dashboard", "runtime_env_agent", "resource_tracker")
"""Parts of command lines of processes that live as long as Ray does and have nothing to do with the run's progress."""


def is_machinery(process: psutil.Process) -> bool:
    """Whether a process is Ray's own."""
    return any(part in word for word in process.cmdline()[:4] for part in _MACHINERY)


def machine_times() -> tuple[float, float]:
    """Seconds that the machine's cores were idle, and all their seconds."""
    times = psutil.cpu_times()
    return times.idle, sum(times)


@dataclass(frozen=True)
class _Snapshot:
    now: float
    cpu: dict[int, float]
    idle: float
    total: float


class Work:
    """What the processes of a run did in the last `window` seconds, or longer on a machine that others keep busy."""

    def __init__(self, window: float, *, machine: Callable[[], tuple[float, float]] = machine_times) -> None:
        self.window = window
        self._machine = machine
        self._snapshots: deque[_Snapshot] = deque()

    def look(self, now: float, processes: Iterable[psutil.Process]) -> None:
        """Remembers what the processes have used. A process that comes, goes or waits for a disk is progress too."""
        cpu: dict[int, float] = {}
        reads = False
        for process in processes:
            try:
                times = process.cpu_times()
                reads = reads or process.status() == psutil.STATUS_DISK_SLEEP
            except psutil.NoSuchProcess:
                continue
            cpu[process.pid] = times.user + times.system
        if reads or (self._snapshots and cpu.keys() != self._snapshots[-1].cpu.keys()):
            self._snapshots.clear()
        self._snapshots.append(_Snapshot(now, cpu, *self._machine()))
        # One snapshot that is old enough for the longest window stays.
        while len(self._snapshots) > 1 and now - self._snapshots[1].now >= self.window * PATIENCE:
            self._snapshots.popleft()

    def stalled(self) -> bool:
        """Whether no process did anything. Always False if the window is 0 or there is no process."""
        if not self.window or not self._snapshots or not self._snapshots[-1].cpu:
            return False
        last = self._snapshots[-1]
        before = self._before(self.window)
        if before is None:
            return False
        if last.idle - before.idle < SATURATED * (last.total - before.total):
            before = self._before(self.window * PATIENCE)
        if before is None:
            return False
        most = max(last.cpu[pid] - before.cpu[pid] for pid in last.cpu)
        return most < SHARE * (last.now - before.now)

    def _before(self, seconds: float) -> _Snapshot | None:
        """The youngest snapshot that is at least so many seconds old."""
        last = self._snapshots[-1].now
        return next((one for one in reversed(self._snapshots) if last - one.now >= seconds), None)
