"""How large the mismatch is and where it sits, from sums that add over batches, files and processes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from verl_rollout_corr.api import correct
from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.diagnosis.records import Bin, Size
from verl_rollout_corr.dumps.reader import DumpBatch
from verl_rollout_corr.dumps.schema import NORMAL
from verl_rollout_corr.grammar import RolloutCorrConfig
from verl_rollout_corr.maths.bins import POSITION, PROBABILITY, STALENESS
from verl_rollout_corr.maths.correction import Correction
from verl_rollout_corr.maths.metrics import finalize
from verl_rollout_corr.maths.sums import Sums

QUANTILES = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)
"""Shares whose quantile of l is reported."""

SENTINEL = -100.0
"""A log-prob of the engine below this is no log-prob: no sampled token has probability 4e-44."""

SLACK = 1e-3
"""A log-prob up to this is rounding of log 1."""

TABLES = ("probability", "position", "length", "turn", "step", "lag", "token")
"""The tables of `where`."""

_LENGTHS = (16, 64, 256, 1024, 4096, 16384)
_TOP_TOKENS = 20
_TURNS = 8
# Edges of the histogram of l: 0 in the middle, 64 steps per factor e outwards from 1e-7.
_STEPS = np.exp(np.arange(math.log(1e-7), math.log(1e3), 1 / 64))
_EDGES = np.concatenate([-_STEPS[::-1], _STEPS])


def usable(batch: DumpBatch) -> np.ndarray:
    """(N,) bool: response tokens of normal rows whose two log-probs are numbers that can be log-probs."""
    rows = np.repeat(batch.kind == NORMAL, batch.lengths)
    return rows & batch.mask & likely(batch.train) & likely(batch.rollout)


def likely(log_probs: np.ndarray) -> np.ndarray:
    """Whether each can be the log-prob of a sampled token."""
    with np.errstate(invalid="ignore"):
        return (log_probs >= SENTINEL) & (log_probs <= SLACK)


def padded_parts(batch: DumpBatch, most: int = 1 << 16) -> Iterator[DumpBatch]:
    """The rows in parts of similar length, so that padding them costs at most as much as they hold."""
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


def corrected(batch: DumpBatch, config: RolloutCorrConfig) -> Correction:
    """`correct` on the rows of a batch."""
    return correct(
        torch.from_numpy(batch.padded(batch.train)),
        torch.from_numpy(batch.padded(batch.rollout)),
        torch.from_numpy(batch.padded(batch.mask)),
        config,
        advantages=None if batch.advantages is None else torch.from_numpy(batch.padded(batch.advantages)),
        group_ids=group_names(batch) if config.min_group_kept is not None else None,
        staleness=torch.from_numpy(batch.lag.astype(np.int64)),
    )


def group_names(batch: DumpBatch) -> list[str]:
    """A name per row, equal for the rows of one group of one step."""
    return [
        f"{step}/{uid if uid is not None else f'#{row}'}"
        for step, uid, row in zip(batch.step, batch.uid, batch.row, strict=True)
    ]


@lru_cache(maxsize=1)
def _metrics_only() -> RolloutCorrConfig:
    return parse({"invalid": "reject"})


@dataclass
class Measured:
    """Sums of a part of a dump; `+` joins two."""

    sums: Sums | None = None
    histogram: np.ndarray = field(default_factory=lambda: np.zeros(len(_EDGES) + 1, np.int64))
    moments: np.ndarray = field(default_factory=lambda: np.zeros(9))
    sequences: np.ndarray = field(default_factory=lambda: np.zeros(3))
    tables: dict[str, dict[Any, np.ndarray]] = field(default_factory=lambda: {name: {} for name in TABLES})
    rows: int = 0
    tokens: int = 0
    invalid: int = 0

    def add(self, batch: DumpBatch) -> None:
        """Takes a batch."""
        normal = np.flatnonzero(batch.kind == NORMAL)
        # In pieces: what is computed per token takes many times the memory of the batch.
        pieces = np.split(normal, np.flatnonzero(np.diff(np.cumsum(batch.lengths[normal]) >> 16)) + 1)
        for piece in pieces:
            if len(piece):
                self._add_piece(batch.take(piece))

    def _add_piece(self, batch: DumpBatch) -> None:
        for part in padded_parts(batch):
            sums = corrected(part, _metrics_only()).sums
            self.sums = sums if self.sums is None else self.sums + sums
        good = usable(batch)
        self.rows += len(batch)
        self.tokens += int(batch.mask.sum())
        self.invalid += int(batch.mask.sum() - good.sum())
        self._add_tokens(batch, good)

    def _add_tokens(self, batch: DumpBatch, good: np.ndarray) -> None:
        row = np.repeat(np.arange(len(batch)), batch.lengths)
        position = np.arange(len(row)) - batch.offsets[:-1][row]
        rollout, train = batch.rollout[good].astype(np.float64), batch.train[good].astype(np.float64)
        difference = train - rollout
        self.histogram += np.bincount(np.searchsorted(_EDGES, difference, side="right"), minlength=len(self.histogram))
        ratio = np.exp(difference.clip(-20, 20))
        # Second moments about -1: log-probs of sampled tokens are of that size, and far from 0 they would cancel.
        a, b = train + 1.0, rollout + 1.0
        self.moments += [x.sum() for x in (np.ones_like(a), ratio, ratio**2, difference**2, a, b, a * a, b * b, a * b)]
        total = np.bincount(row[good], difference, len(batch)).clip(-20, 20)
        product = np.exp(total)[np.bincount(row[good], minlength=len(batch)) > 0]
        self.sequences += [len(product), product.sum(), (product**2).sum()]
        length = np.bincount(row, batch.mask, len(batch))
        keys = {
            "probability": np.searchsorted(PROBABILITY.edges, np.exp(rollout), side="right"),
            "position": np.searchsorted(POSITION.edges, position[good], side="right"),
            "length": np.searchsorted(_LENGTHS, length[row[good]], side="right"),
            "turn": _turns(batch, row)[good].clip(max=_TURNS),
            "step": batch.step[row[good]],
            "lag": np.searchsorted(STALENESS.edges, batch.lag[row[good]], side="right"),
        }
        if batch.ids is not None:
            keys["token"] = batch.ids[good]
        k3 = np.expm1(difference.clip(-20, 20)) - difference
        values = np.stack([np.ones_like(k3), -difference, k3, np.abs(difference), difference**2])
        for name, key in keys.items():
            _sum_by(self.tables[name], key, values)

    def __add__(self, other: Measured) -> Measured:
        total = Measured(
            self.sums + other.sums if self.sums is not None and other.sums is not None else self.sums or other.sums,
            self.histogram + other.histogram,
            self.moments + other.moments,
            self.sequences + other.sequences,
            {name: dict(table) for name, table in self.tables.items()},
            self.rows + other.rows,
            self.tokens + other.tokens,
            self.invalid + other.invalid,
        )
        for name, table in other.tables.items():
            for key, values in table.items():
                total.tables[name][key] = total.tables[name].get(key, 0) + values
        return total

    def size(self) -> Size | None:
        """The record, or None where no token is usable."""
        count, ratio, square, energy = self.moments[:4]
        if self.sums is None or not count:
            return None
        metrics = {name.removeprefix("rollout_corr/"): value for name, value in finalize(self.sums).items()}
        sequences, product, products = self.sequences
        known = self.tables["lag"].get(1)
        return Size(
            tokens=int(count),
            sequences=self.rows,
            steps=len(self.tables["step"]),
            kl=metrics["kl"],
            k3=metrics["k3_kl"],
            abs_log_ratio=self._mean(3),
            rms=math.sqrt(energy / count),
            mean_ratio=ratio / count,
            quantiles={f"{share:g}": self._quantile(share) for share in QUANTILES},
            ess_token=ratio**2 / (count * square),
            ess_seq=product**2 / (sequences * products),
            chi2_token=metrics["chi2_token"],
            chi2_seq=metrics["chi2_seq"],
            pearson=metrics["probs_pearson_corr"],
            pearson_log=self._pearson_log(),
            noise_floor_k3=None if known is None else float(known[2] / known[0]),
            invalid=self.invalid,
        )

    def _mean(self, index: int) -> float:
        total = np.sum(list(self.tables["step"].values()), axis=0)
        return float(total[index] / total[0])

    def _quantile(self, share: float) -> float:
        """Of l, from the histogram: exact to one step of it, which is 1.6 % of l."""
        total = np.cumsum(self.histogram)
        place = int(np.searchsorted(total, share * total[-1]))
        centres = np.concatenate([[-1e3], (_EDGES[1:] + _EDGES[:-1]) / 2, [1e3]])
        return float(centres[place])

    def _pearson_log(self) -> float:
        n, _, _, _, a, b, aa, bb, ab = self.moments
        spread = (aa / n - (a / n) ** 2) * (bb / n - (b / n) ** 2)
        return float((ab / n - a * b / n**2) / math.sqrt(spread)) if spread > 0 else 0.0

    def where(self) -> dict[str, tuple[Bin, ...]]:
        """The tables of bins, empty bins left out. Of token ids, those with the largest sums of |l|."""
        length_labels = _labels(_LENGTHS)
        labels: dict[str, Any] = {
            "probability": PROBABILITY.labels.__getitem__,
            "position": POSITION.labels.__getitem__,
            "length": length_labels.__getitem__,
            "turn": lambda key: f"{key + 1}" if key < _TURNS else f"{_TURNS + 1}_up",
            "lag": STALENESS.labels.__getitem__,
        }
        result: dict[str, tuple[Bin, ...]] = {}
        for name, table in self.tables.items():
            keys = sorted(table)
            if name == "token":
                keys = sorted(table, key=lambda key: -table[key][3])[:_TOP_TOKENS]
            label = labels.get(name, str)
            result[name] = tuple(_bin(label(int(key)), table[key]) for key in keys)
        return result


def _turns(batch: DumpBatch, row: np.ndarray) -> np.ndarray:
    """(N,) the number of the turn, from 0."""
    starts = batch.mask.copy()
    starts[1:] &= ~(batch.mask[:-1] & (row[1:] == row[:-1]))
    total = np.cumsum(starts)
    before = np.concatenate([[0], total])[batch.offsets[:-1]]
    return (total - before[row] - 1).clip(min=0)


def _labels(edges: tuple[int, ...]) -> tuple[str, ...]:
    lows = (0, *edges)
    return tuple(
        f"{low}_{high - 1}" if high is not None else f"{low}_up" for low, high in zip(lows, (*edges, None), strict=True)
    )


def _bin(label: str, sums: np.ndarray) -> Bin:
    count = sums[0]
    means = [float(value / count) for value in sums[1:]]
    return Bin(label, int(count), means[0], means[1], means[2], math.sqrt(means[3]))


def _sum_by(table: dict[Any, np.ndarray], keys: np.ndarray, values: np.ndarray) -> None:
    """Adds the columns of `values` (k, N) to the entry of each key."""
    found, inverse = np.unique(keys, return_inverse=True)
    sums = np.stack([np.bincount(inverse, row, len(found)) for row in values], axis=1)
    for key, total in zip(found.tolist(), sums, strict=True):
        table[key] = table.get(key, 0) + total
