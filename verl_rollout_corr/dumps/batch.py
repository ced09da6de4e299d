"""Rows of a dump, as flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verl_rollout_corr.dumps.schema import DumpError, Facts


@dataclass(frozen=True)
class DumpBatch:
    """Rows of a dump. Per row (B,): step, row, group, lag (-1 unknown), prompt_length (-1 unknown), kind, uid,
    rejected_by. Per position, flat (N,), row i at offsets[i]:offsets[i + 1]: ids, mask, train, rollout, advantages,
    weights, keep; None where the dump has none.
    """

    facts: Facts
    file: str
    step: np.ndarray
    row: np.ndarray
    group: np.ndarray
    lag: np.ndarray
    prompt_length: np.ndarray
    kind: np.ndarray
    uid: Sequence[str | None]
    rejected_by: Sequence[Sequence[str]]
    offsets: np.ndarray
    ids: np.ndarray | None
    mask: np.ndarray
    train: np.ndarray
    rollout: np.ndarray
    advantages: np.ndarray | None
    weights: np.ndarray | None
    keep: np.ndarray | None

    def __len__(self) -> int:
        return len(self.step)

    @property
    def lengths(self) -> np.ndarray:
        """(B,) positions of each row."""
        return np.diff(self.offsets)

    def take(self, rows: np.ndarray) -> DumpBatch:
        """The batch of these rows, in this order."""
        rows = np.asarray(rows, dtype=np.int64)
        lengths = self.lengths[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        places = np.repeat(self.offsets[:-1][rows], lengths) + within

        def tokens(values: np.ndarray | None) -> np.ndarray | None:
            return None if values is None else values[places]

        return DumpBatch(
            facts=self.facts,
            file=self.file,
            **{name: getattr(self, name)[rows] for name in ("step", "row", "group", "lag", "prompt_length", "kind")},
            uid=[self.uid[int(row)] for row in rows],
            rejected_by=[self.rejected_by[int(row)] for row in rows],
            offsets=offsets,
            ids=tokens(self.ids),
            mask=self.mask[places],
            train=self.train[places],
            rollout=self.rollout[places],
            advantages=tokens(self.advantages),
            weights=tokens(self.weights),
            keep=tokens(self.keep),
        )

    def padded(self, values: np.ndarray, fill: float | bool = 0) -> np.ndarray:
        """(B, T) of a flat column, `fill` behind each row."""
        lengths = self.lengths
        width = int(lengths.max(initial=0))
        inside = np.arange(width)[None, :] < lengths[:, None]
        result = np.full((len(lengths), width), fill, dtype=values.dtype)
        result[inside] = values
        return result


def joined(batches: Sequence[DumpBatch]) -> DumpBatch:
    """Several batches as one. A column that one of them lacks is left out."""
    if len(batches) == 1:
        return batches[0]
    if not batches:
        raise DumpError("a file of the dump has no rows")

    def along(name: str) -> np.ndarray:
        return np.concatenate([getattr(batch, name) for batch in batches])

    def optional(name: str) -> np.ndarray | None:
        return None if any(getattr(batch, name) is None for batch in batches) else along(name)

    lengths = np.concatenate([batch.lengths for batch in batches])
    return DumpBatch(
        facts=batches[0].facts,
        file=batches[0].file,
        **{name: along(name) for name in ("step", "row", "group", "lag", "prompt_length", "kind")},
        uid=[uid for batch in batches for uid in batch.uid],
        rejected_by=[names for batch in batches for names in batch.rejected_by],
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        mask=along("mask"),
        train=along("train"),
        rollout=along("rollout"),
        ids=optional("ids"),
        advantages=optional("advantages"),
        weights=optional("weights"),
        keep=optional("keep"),
    )
