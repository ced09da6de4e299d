"""The sample that detectors look at: whole groups of rows, drawn from a stream, in bounded memory.

Which groups are kept depends on their names alone. It does not depend on the order of files, nor on which process reads
them, so two samples can be added.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from verl_rollout_corr.diagnosis.shared import shared_contexts
from verl_rollout_corr.dumps.reader import DumpBatch, joined
from verl_rollout_corr.dumps.schema import NORMAL, Facts

CAPACITY = 400_000
"""The most positions that a sample holds."""


@dataclass
class Reservoir:
    """Collects whole groups up to a capacity: those whose hash is below a threshold, which is lowered as it fills."""

    capacity: int = CAPACITY
    threshold: int = 1 << 32
    parts: list[tuple[np.ndarray, DumpBatch]] = field(default_factory=list)
    size: int = 0

    def add(self, batch: DumpBatch) -> None:
        """Takes the rows of a batch that have a response token."""
        rows = np.flatnonzero(batch.kind == NORMAL)
        if not len(rows):
            return
        names = [
            f"{batch.step[row]}/{batch.uid[row] if batch.uid[row] is not None else f'{batch.file}#{batch.row[row]}'}"
            for row in rows
        ]
        self._take(
            np.array([zlib.crc32(name.encode("utf-8", "replace")) for name in names], np.int64), batch.take(rows)
        )

    def _take(self, hashes: np.ndarray, batch: DumpBatch) -> None:
        kept = np.flatnonzero(hashes < self.threshold)
        if not len(kept):
            return
        chosen = batch.take(kept) if len(kept) < len(hashes) else batch
        self.parts.append((hashes[kept], chosen))
        self.size += len(chosen.mask)
        while self.size > self.capacity and sum(len(hashes) for hashes, _ in self.parts) > 1:
            self._halve()

    def _halve(self) -> None:
        self.threshold //= 2
        held, self.parts, self.size = self.parts, [], 0
        for hashes, batch in held:
            kept = np.flatnonzero(hashes < self.threshold)
            if len(kept):
                self.parts.append((hashes[kept], batch.take(kept)))
                self.size += len(self.parts[-1][1].mask)

    def __add__(self, other: Reservoir) -> Reservoir:
        total = Reservoir(self.capacity, min(self.threshold, other.threshold))
        for hashes, batch in (*self.parts, *other.parts):
            total._take(hashes, batch)
        return total

    def sample(self) -> Sample:
        """What was collected. Raises ValueError if that is nothing."""
        if not self.parts:
            raise ValueError("no row with a response token")
        return Sample(joined([batch for _, batch in self.parts]), whole=self.threshold == 1 << 32)


def collected(batches: Iterable[DumpBatch], capacity: int = CAPACITY) -> Reservoir:
    """The reservoir of some batches."""
    reservoir = Reservoir(capacity)
    for batch in batches:
        reservoir.add(batch)
    return reservoir


@dataclass(frozen=True)
class Sample:
    """Whole rows, flattened. `whole`: whether it holds every row of the dump."""

    batch: DumpBatch
    whole: bool

    @property
    def facts(self) -> Facts:
        """The facts of the run."""
        return self.batch.facts

    @cached_property
    def row(self) -> np.ndarray:
        """(N,) the row of each position."""
        return np.repeat(np.arange(len(self.batch)), self.batch.lengths)

    @cached_property
    def position(self) -> np.ndarray:
        """(N,) the position within the response."""
        return np.arange(len(self.row)) - self.batch.offsets[:-1][self.row]

    @cached_property
    def turn(self) -> np.ndarray:
        """(N,) the number of the turn; at positions that are not response tokens, that of the previous turn."""
        mask = self.batch.mask
        starts = mask & ~np.concatenate([[False], mask[:-1]])
        first = np.zeros(len(mask), bool)
        first[self.batch.offsets[:-1][self.batch.lengths > 0]] = True
        starts |= mask & first
        total = np.cumsum(starts)
        before = (
            total[self.batch.offsets[:-1].clip(max=max(len(mask) - 1, 0))]
            - starts[self.batch.offsets[:-1].clip(max=max(len(mask) - 1, 0))]
        )
        return total - before[self.row] - 1

    @cached_property
    def context(self) -> np.ndarray | None:
        """(N,) a number per context: equal where rows of one group share step, prompt and all earlier tokens. -1 in a
        row without a group. None if the dump has no token ids.
        """
        return shared_contexts(self.batch, self.row, self.position)
