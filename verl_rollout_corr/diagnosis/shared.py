"""Contexts that rows of one group share: step, prompt and all earlier tokens are equal."""

from __future__ import annotations

import numpy as np

from verl_rollout_corr.diagnosis.rows import likely
from verl_rollout_corr.dumps.reader import DumpBatch

_EXPECTED, _LEAST = 5.0, 0.25  # equal draws that count as evidence, and the least share of them that has to be seen


def shared_contexts(batch: DumpBatch, row: np.ndarray, position: np.ndarray) -> np.ndarray | None:
    """(N,) a number per context, -1 where no other row shares it. None if the dump has no token ids.

    Rows of one uid may have had different prompts (a uid per worker or per batch, a dump that was put together by
    hand). Then no context is shared, and all are -1.
    """
    ids = batch.ids
    if ids is None:
        return None
    found = _contexts(batch, ids, row, position)
    return found if _are_shared(batch, ids, found) else np.full_like(found, -1)


def _contexts(batch: DumpBatch, ids: np.ndarray, row: np.ndarray, position: np.ndarray) -> np.ndarray:
    names: dict[tuple[int, str], int] = {}
    start = np.full(len(batch), -1, np.int64)
    for number, (step, uid) in enumerate(zip(batch.step, batch.uid, strict=True)):
        if uid is not None:
            start[number] = names.setdefault((int(step), uid), len(names))
    result = np.full(len(row), -1, np.int64)
    # Contexts are compared one position at a time. A row that no longer shares its context is not followed further.
    current, alive, taken = start.copy(), start >= 0, 0
    for depth in range(int(batch.lengths.max(initial=0))):
        alive &= batch.lengths > depth
        rows = np.flatnonzero(alive)
        if len(rows) < 2:
            break
        _, inverse, counts = np.unique(current[rows], return_inverse=True, return_counts=True)
        shared = counts[inverse] > 1
        alive[rows[~shared]] = False
        rows, inverse = rows[shared], inverse[shared]
        places = batch.offsets[rows] + depth
        result[places] = taken + inverse
        taken += len(counts)
        _, current[rows] = np.unique(np.stack([inverse, ids[places]]), axis=1, return_inverse=True)
    return result


def _are_shared(batch: DumpBatch, ids: np.ndarray, context: np.ndarray) -> bool:
    """Whether rows of one context draw equal tokens as often as either side's probabilities say.

    Of n rows in one context, the others draw row i's token a_i with probability mu(a_i): among ordered pairs of rows
    the expected number of equal tokens is the sum of (n - 1) mu(a_i). It is never reached if the contexts differ.
    """
    inside = np.flatnonzero((context >= 0) & batch.mask)
    if not len(inside):
        return True
    _, of, size = np.unique(context[inside], return_inverse=True, return_counts=True)
    _, same, equal = np.unique(np.stack([of, ids[inside]]), axis=1, return_inverse=True, return_counts=True)
    seen = float((equal[same] - 1).sum())
    for values in (batch.train[inside], batch.rollout[inside]):
        probability = np.where(likely(values), np.exp(np.minimum(values.astype(np.float64), 0.0)), 0.0)
        expected = float((probability * (size[of] - 1)).sum())
        if expected < _EXPECTED or seen >= _LEAST * expected:
            return True
    return False
