"""Reads the files of a dump once, in this process or in others. What each gathers adds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from multiprocessing import get_context

from verl_rollout_corr.diagnosis.sample import CAPACITY, Reservoir
from verl_rollout_corr.diagnosis.size import Measured
from verl_rollout_corr.dumps.reader import Dump, DumpBatch

Progress = Callable[[int, int], None]
"""Called with rows read and rows in all."""

UNREAD = ("advantages", "weights", "keep", "rejected_by")
"""Columns that a diagnosis does not look at."""


@dataclass
class Gathered:
    """The sums of a part of a dump and a sample of its rows; `+` joins two."""

    measured: Measured = field(default_factory=Measured)
    reservoir: Reservoir = field(default_factory=Reservoir)
    rows: int = 0

    def add(self, batch: DumpBatch) -> None:
        """Takes a batch."""
        self.measured.add(batch)
        self.reservoir.add(batch)
        self.rows += len(batch)

    def __add__(self, other: Gathered) -> Gathered:
        return Gathered(self.measured + other.measured, self.reservoir + other.reservoir, self.rows + other.rows)


Task = Callable[[Dump, int], Gathered]
"""(a dump of one file, capacity of the sample) -> what it holds. It can be pickled."""
Spread = Callable[[Task, Sequence[Dump], int], Iterator[Gathered]]
"""Runs a task on each file, somewhere, and yields what it gives, in any order: `by_processes`, `cli.spread.by_ray`."""


def gathered(
    dump: Dump, *, spread: Spread | None = None, progress: Progress | None = None, capacity: int = CAPACITY
) -> Gathered:
    """What a diagnosis needs of a dump. `spread`: who reads its files; None: this process, one after another.

    Raises DumpError for what is not a dump.
    """
    if spread is None or len(dump.files) == 1:
        return _of(dump, capacity, progress)
    total = Gathered(reservoir=Reservoir(capacity))
    for part in spread(_of, [replace(dump, files=(file,)) for file in dump.files], capacity):
        total = total + part
        if progress is not None:
            progress(total.rows, dump.rows)
    return total


def by_processes(workers: int) -> Spread | None:
    """Processes of this machine that read files side by side; None for one."""

    def spread(task: Task, files: Sequence[Dump], capacity: int) -> Iterator[Gathered]:
        # A fork of a process that has threads (Arrow's) may hang.
        with ProcessPoolExecutor(min(workers, len(files)), mp_context=get_context("spawn")) as pool:
            for done in as_completed([pool.submit(task, file, capacity) for file in files]):
                yield done.result()

    return spread if workers > 1 else None


def _of(dump: Dump, capacity: int, progress: Progress | None = None) -> Gathered:
    total = Gathered(reservoir=Reservoir(capacity))
    for batch in dump.batches(without=UNREAD):
        total.add(batch)
        if progress is not None:
            progress(total.rows, dump.rows)
    return total
