"""How large the mismatch is and where it sits, from sums that add over batches, files and processes.

It uses NumPy alone: torch would take more memory than all of the sums, and a laptop may not have it. A test compares
the values with the metrics of `correct`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl_rollout_corr.diagnosis.records import Bin, Size
from verl_rollout_corr.diagnosis.rows import usable
from verl_rollout_corr.dumps.reader import DumpBatch
from verl_rollout_corr.dumps.schema import NORMAL
from verl_rollout_corr.maths.bins import POSITION, PROBABILITY, STALENESS

QUANTILES = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)
"""Shares whose quantile of l is reported."""

TABLES = ("probability", "position", "length", "turn", "step", "lag", "token")
"""The tables of `where`."""

_LENGTHS = (16, 64, 256, 1024, 4096, 16384)
_TOP_TOKENS = 20
_TURNS = 8
# Edges of the histogram of l: 0 in the middle, 64 steps per factor e outwards from 1e-7.
_STEPS = np.exp(np.arange(math.log(1e-7), math.log(1e3), 1 / 64))
_EDGES = np.concatenate([-_STEPS[::-1], _STEPS])


@dataclass
class Measured:
    """Sums of a part of a dump; `+` joins two."""

    histogram: np.ndarray = field(default_factory=lambda: np.zeros(len(_EDGES) + 1, np.int64))
    moments: np.ndarray = field(default_factory=lambda: np.zeros(14))
    sequences: np.ndarray = field(default_factory=lambda: np.zeros(3))
    tables: dict[str, dict[Any, np.ndarray]] = field(default_factory=lambda: {name: {} for name in TABLES})
    rows: int = 0
    tokens: int = 0
    invalid: int = 0

    def add(self, batch: DumpBatch) -> None:
        """Takes a batch."""
        normal = np.flatnonzero(batch.kind == NORMAL)
        # In pieces, because what is computed per token takes many times the memory of the batch.
        pieces = np.split(normal, np.flatnonzero(np.diff(np.cumsum(batch.lengths[normal]) >> 16)) + 1)
        for piece in pieces:
            if len(piece):
                self._add_piece(batch.take(piece))

    def _add_piece(self, batch: DumpBatch) -> None:
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
        # Second moments are about -1, a typical log-prob of a sampled token: about 0 they would lose digits.
        a, b = train + 1.0, rollout + 1.0
        # Probabilities are about 1: those of likely tokens differ from it by less than rounding would lose about 0.
        p, q = np.expm1(train.clip(max=0.0)), np.expm1(rollout.clip(max=0.0))
        self.moments += [
            x.sum()
            for x in (
                np.ones_like(a), ratio, ratio**2, difference**2, a, b, a * a, b * b, a * b, p, q, p * p, q * q, p * q,
            )
        ]  # fmt: skip
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
        if not count:
            return None
        total = np.sum(list(self.tables["step"].values()), axis=0) / count
        sequences, product, products = self.sequences
        known = self.tables["lag"].get(1)
        return Size(
            tokens=int(count),
            sequences=self.rows,
            steps=len(self.tables["step"]),
            kl=float(total[1]),
            k3=float(total[2]),
            abs_log_ratio=float(total[3]),
            rms=math.sqrt(energy / count),
            mean_ratio=ratio / count,
            quantiles={f"{share:g}": self._quantile(share) for share in QUANTILES},
            ess_token=ratio**2 / (count * square),
            ess_seq=product**2 / (sequences * products),
            chi2_token=float(square / count - 1),
            chi2_seq=float(products / sequences - 1),
            pearson=_pearson(count, self.moments[9:]),
            pearson_log=_pearson(count, self.moments[4:9]),
            noise_floor_k3=None if known is None else float(known[2] / known[0]),
            invalid=self.invalid,
        )

    def _quantile(self, share: float) -> float:
        """Quantiles of l from the histogram, accurate to one of its steps, which is 1.6 % of l."""
        total = np.cumsum(self.histogram)
        place = int(np.searchsorted(total, share * total[-1]))
        centres = np.concatenate([[-1e3], (_EDGES[1:] + _EDGES[:-1]) / 2, [1e3]])
        return float(centres[place])

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


def _pearson(n: float, sums: np.ndarray) -> float:
    """The correlation of a and b, from the sums of a, b, a^2, b^2 and ab; 0 where one of them is constant."""
    a, b, aa, bb, ab = sums / n
    spread = (aa - a**2) * (bb - b**2)
    return float((ab - a * b) / math.sqrt(spread)) if spread > 1e-30 else 0.0


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
