"""The counts and sums over a dump that the charts show. Blocks of rows are added one by one, in constant memory.

Everything here is NumPy on flat arrays of response tokens. A block's log-ratio is l = log pi_train - log mu.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
"""Numbers."""
Counts = NDArray[np.int64]
"""Counts, steps, lags and ids."""

PROBABILITY_EDGES: Floats = np.array([0.0, 0.01, 0.1, 0.5, 0.9, 1.0 + 1e-9])
"""Bins of mu(a_t), those of the metrics `by_prob`."""
PROBABILITY_LABELS = ("below 0.01", "0.01 to 0.1", "0.1 to 0.5", "0.5 to 0.9", "above 0.9")
"""What the bins of mu(a_t) are called."""
SCATTER_EDGES: Floats = np.linspace(-12.0, 0.0, 49)
"""Edges of both axes of the scatter, in log-probs. Smaller values are in the first bin."""
RATIO_EDGES: Floats = np.concatenate([-np.geomspace(8, 1e-5, 49), [0.0], np.geomspace(1e-5, 8, 49)])
"""Edges of the histogram of l."""
POSITION_EDGES: Floats = np.concatenate([[0], np.geomspace(1, 131072, 35).round()])
"""Edges of the bins of the position in the response."""
LENGTH_EDGES: Floats = np.concatenate([[1], np.geomspace(2, 131072, 18).round()])
"""Edges of the bins of the response length."""
WEIGHT_EDGES: Floats = np.concatenate([[0.0], np.geomspace(1e-3, 20, 41)])
"""Edges of the histogram of the weights; the first bin holds weights of 0 too."""


@dataclass(frozen=True)
class Rows:
    """A block of sequences with response tokens only, flattened.

    Per row: `row` (its number in the dump), `step`, `lag` (-1 unknown), `length`. Per token: `train`, `rollout`,
    `position`, `owner` (index into the rows of the block), `keep`, `weight` (1 without weights), `token`.
    """

    row: Counts
    step: Counts
    lag: Counts
    length: Counts
    train: Floats
    rollout: Floats
    position: Counts
    owner: Counts
    keep: NDArray[np.bool_]
    weight: Floats
    token: Counts


@dataclass
class StepSums:
    """Sums of one step."""

    tokens: int = 0
    sequences: int = 0
    kept_tokens: int = 0
    kl: float = 0.0
    k3: float = 0.0
    finite: int = 0
    weight: float = 0.0
    weight_square: float = 0.0

    def add(self, other: StepSums) -> None:
        """Add the sums of more rows."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(frozen=True, order=True)
class WorstRow:
    """A sequence with a large mean k3, with the tokens around its largest |l|."""

    k3: float
    row: int
    step: int
    length: int
    kept: bool
    lag: int
    first: int
    tokens: tuple[int, ...] = field(compare=False)
    train: tuple[float, ...] = field(compare=False)
    rollout: tuple[float, ...] = field(compare=False)


WORST = 8
"""How many sequences are shown token by token."""
SHOWN_TOKENS = 160
"""How many tokens of each, around the largest |l|."""


@dataclass
class Evidence:
    """The counts behind the charts; `add` takes blocks in any order."""

    steps: dict[int, StepSums] = field(default_factory=dict)
    scatter: Counts = field(default_factory=lambda: np.zeros((48, 48), dtype=np.int64))
    ratios: Counts = field(default_factory=lambda: np.zeros((5, len(RATIO_EDGES) + 1), dtype=np.int64))
    positions: Floats = field(default_factory=lambda: np.zeros((3, len(POSITION_EDGES))))
    lengths: Floats = field(default_factory=lambda: np.zeros((4, len(LENGTH_EDGES))))
    lags: dict[int, StepSums] = field(default_factory=dict)
    weights: Counts = field(default_factory=lambda: np.zeros(len(WEIGHT_EDGES) + 1, dtype=np.int64))
    worst: list[WorstRow] = field(default_factory=list)

    def add(self, rows: Rows) -> None:
        """Add a block of rows."""
        log_ratio = rows.train - rows.rollout
        k3 = np.maximum(np.expm1(np.clip(log_ratio, -20, 20)) - np.maximum(log_ratio, -1e8), 0.0)
        absolute = np.where(np.isfinite(log_ratio), np.abs(log_ratio), 20.0)
        bins = np.clip(np.digitize(np.exp(rows.rollout), PROBABILITY_EDGES) - 1, 0, 4)
        self._scatter(rows)
        np.add.at(self.ratios, (bins, np.digitize(log_ratio, RATIO_EDGES)), 1)
        at = np.digitize(rows.position, POSITION_EDGES) - 1
        for index, values in enumerate((np.ones_like(k3), k3, absolute)):
            self.positions[index] += np.bincount(at, values, len(POSITION_EDGES))[: len(POSITION_EDGES)]
        self.weights += np.bincount(np.digitize(rows.weight, WEIGHT_EDGES), minlength=len(WEIGHT_EDGES) + 1)
        self._rows(rows, log_ratio, k3)

    def _scatter(self, rows: Rows) -> None:
        axes = [
            np.clip(np.digitize(np.maximum(side, -1e9), SCATTER_EDGES) - 1, 0, 47)
            for side in (rows.rollout, rows.train)
        ]
        self.scatter += np.bincount(axes[0] * 48 + axes[1], minlength=48 * 48).reshape(48, 48)

    def _rows(self, rows: Rows, log_ratio: Floats, k3: Floats) -> None:
        count = len(rows.row)
        total = np.bincount(rows.owner, k3, count)
        finite = np.isfinite(log_ratio)
        per_row = {
            "kl": np.bincount(rows.owner, np.where(finite, -log_ratio, 0.0), count),
            "k3": total,
            "finite": np.bincount(rows.owner, finite, count),
            "kept_tokens": np.bincount(rows.owner, rows.keep, count),
            "weight": np.bincount(rows.owner, rows.weight, count),
            "weight_square": np.bincount(rows.owner, rows.weight**2, count),
        }
        for groups, keys in ((self.steps, rows.step), (self.lags, rows.lag)):
            for key in np.unique(keys):
                chosen = keys == key
                sums = StepSums(tokens=int(rows.length[chosen].sum()), sequences=int(chosen.sum()))
                for name, values in per_row.items():
                    value = values[chosen].sum()
                    setattr(sums, name, int(value) if name in ("finite", "kept_tokens") else float(value))
                groups.setdefault(int(key), StepSums()).add(sums)
        mean = total / np.maximum(rows.length, 1)
        at = np.digitize(rows.length, LENGTH_EDGES) - 1
        kept = per_row["kept_tokens"] > 0
        for index, values in enumerate((np.ones(count), mean, kept, rows.length)):
            self.lengths[index] += np.bincount(at, values, len(LENGTH_EDGES))[: len(LENGTH_EDGES)]
        self._worst(rows, log_ratio, mean, kept)

    def _worst(self, rows: Rows, log_ratio: Floats, mean: Floats, kept: NDArray[np.bool_]) -> None:
        starts = np.concatenate([[0], np.cumsum(rows.length)])
        for index in np.argsort(-mean, kind="stable")[:WORST]:
            if len(self.worst) >= WORST and mean[index] <= self.worst[0].k3:
                break
            inside = slice(int(starts[index]), int(starts[index + 1]))
            absolute = np.abs(np.nan_to_num(log_ratio[inside], nan=0.0, neginf=-99.0))
            first = max(0, int(absolute.argmax()) - SHOWN_TOKENS // 2)
            shown = slice(inside.start + first, min(inside.start + first + SHOWN_TOKENS, inside.stop))
            found = WorstRow(
                float(mean[index]),
                int(rows.row[index]),
                int(rows.step[index]),
                int(rows.length[index]),
                bool(kept[index]),
                int(rows.lag[index]),
                first,
                tuple(int(token) for token in rows.token[shown]),
                tuple(float(value) for value in rows.train[shown]),
                tuple(float(value) for value in rows.rollout[shown]),
            )
            heapq.heappush(self.worst, found)
            if len(self.worst) > WORST:
                heapq.heappop(self.worst)
