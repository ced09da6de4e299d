"""Whether the processes of a run do anything."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import psutil

IDLE_SHARE = 0.1
"""CPU seconds per second that the processes of an idle run use by asking each other: less counts as no work."""

_MACHINERY = ("raylet", "gcs_server", "log_monitor.py", "dashboard", "runtime_env_agent", "resource_tracker")
"""Parts of command lines of processes that live as long as Ray does and have nothing to do with the run's progress."""
_WANTS = (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)


def is_machinery(process: psutil.Process) -> bool:
    """Whether a process is Ray's own."""
    return any(part in word for word in process.cmdline()[:4] for part in _MACHINERY)


class Work:
    """What the processes of a run did in the last `window` seconds."""

    def __init__(self, window: float) -> None:
        self.window = window
        self._since: float | None = None
        self._last: float | None = None
        self._cpu: dict[int, float] = {}
        self._done: deque[tuple[float, float]] = deque()

    def look(self, now: float, processes: Iterable[psutil.Process]) -> None:
        """Adds what the processes did since the last look. That a process comes or goes is progress too."""
        passed = 0.0 if self._last is None else now - self._last
        self._last = now
        done = 0.0
        cpu: dict[int, float] = {}
        for process in processes:
            try:
                times, status = process.cpu_times(), process.status()
            except psutil.NoSuchProcess:
                continue
            cpu[process.pid] = times.user + times.system
            used = cpu[process.pid] - self._cpu.get(process.pid, cpu[process.pid])
            # On a busy machine or a slow disk, a process that wants to work does not get to it.
            done += max(used, passed) if status in _WANTS else used
        if self._since is None or cpu.keys() != self._cpu.keys():
            self._since = now
            self._done.clear()
        self._cpu = cpu
        self._done.append((now, done))

    def stalled(self, now: float) -> bool:
        """Whether nothing was done in the whole window. Never, if the window is 0 or there is no process."""
        if not self.window or not self._cpu or self._since is None or now - self._since < self.window:
            return False
        while self._done and now - self._done[0][0] >= self.window:
            self._done.popleft()
        return sum(done for _, done in self._done) < IDLE_SHARE * self.window
