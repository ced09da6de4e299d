"""Reads the files of a dump once, in this process or in others. What the processes gather can be added up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from multiprocessing import get_context

from verl_rollout_corr.diagnosis.sample import CAPACITY, Reservoir
from verl_rollout_corr.diagnosis.size import Measured
from verl_rollout_corr.dumps.reader import Dump, DumpBatch

Progress = Callable[[int, int], None]
"""Called with the number of rows read so far and of all rows."""

UNREAD = ("advantages", "weights", "keep", "rejected_by")
"""Columns that a diagnosis does not read."""


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
"""(a dump of one file, capacity of the sample) -> what was gathered of it, which can be pickled."""
Spread = Callable[[Task, Sequence[Dump], int], Iterator[Gathered]]
"""Runs a task on each file, in some process; yields the results in any order: `by_processes`, `cli.spread.by_ray`."""


def gathered(
    dump: Dump, *, spread: Spread | None = None, progress: Progress | None = None, capacity: int = CAPACITY
) -> Gathered:
    """What a diagnosis needs of a dump. `spread`: which processes read its files; None: this one, one after another.

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
    """Lets so many processes of this machine read files at the same time; None for one."""

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
