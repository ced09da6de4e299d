"""Rows and tokens of a batch of a dump, in NumPy: which are usable, and how rows are grouped for padding."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from verl_rollout_corr.dumps.reader import DumpBatch
from verl_rollout_corr.dumps.schema import NORMAL

SENTINEL = -100.0
"""A number of the engine below this is not a log-prob: no sampled token has probability 4e-44."""

SLACK = 1e-3
"""A log-prob above 0 and up to this is log 1 with a rounding error."""


def usable(batch: DumpBatch) -> np.ndarray:
    """(N,) bool: response tokens of normal rows whose two log-probs are both possible."""
    rows = np.repeat(batch.kind == NORMAL, batch.lengths)
    return rows & batch.mask & likely(batch.train) & likely(batch.rollout)


def likely(log_probs: np.ndarray) -> np.ndarray:
    """Whether each can be the log-prob of a sampled token."""
    with np.errstate(invalid="ignore"):
        return (log_probs >= SENTINEL) & (log_probs <= SLACK)


def padded_parts(batch: DumpBatch, most: int = 1 << 16) -> Iterator[DumpBatch]:
    """The rows in parts of similar length, so that there is at most as much padding as data."""
    order = np.argsort(batch.lengths, kind="stable")
    lengths = batch.lengths[order]
    start = 0
    for stop in range(1, len(order) + 1):
        if (
            stop == len(order)
            or lengths[stop] > 2 * max(lengths[start], 8)
            or lengths[stop] * (stop + 1 - start) > most
        ):
            yield batch.take(np.sort(order[start:stop]))
            start = stop


def group_names(batch: DumpBatch) -> list[str]:
    """A name per row, equal for the rows of one group of one step."""
    return [
        f"{step}/{uid if uid is not None else f'#{row}'}"
        for step, uid, row in zip(batch.step, batch.uid, batch.row, strict=True)
    ]
