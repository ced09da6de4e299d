"""The tokens that detectors look at, as flat float64 arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from verl_rollout_corr.diagnosis.rows import likely
from verl_rollout_corr.diagnosis.sample import Sample

MISSING = 20.0
"""The |l| of a token whose log-prob is not a number: the bound of every exponent."""


def typical(values: np.ndarray) -> float:
    """The root mean square without the largest percent."""
    size = np.sort(np.abs(values))[: max(int(0.99 * len(values)), 1)]
    return float(np.sqrt((size**2).mean()))


def median_by(values: np.ndarray, bins: np.ndarray) -> np.ndarray:
    """(N,) the median of the values of each one's bin."""
    medians = np.ones(int(bins.max(initial=0)) + 1)
    for key in np.unique(bins):
        medians[key] = np.median(values[bins == key])
    return medians[bins]


@dataclass(frozen=True)
class View:
    """Response tokens of a sample: `place` (N,) are their positions in it."""

    sample: Sample
    place: np.ndarray

    @classmethod
    def of(cls, sample: Sample) -> View:
        """Every response token, including those with impossible log-probs."""
        return cls(sample, np.flatnonzero(sample.batch.mask))

    def where(self, chosen: np.ndarray) -> View:
        """The tokens where `chosen` (N,) bool is true."""
        return View(self.sample, self.place[chosen])

    def __len__(self) -> int:
        return len(self.place)

    @cached_property
    def train(self) -> np.ndarray:
        """Log pi_train."""
        return self.sample.batch.train[self.place].astype(np.float64)

    @cached_property
    def rollout(self) -> np.ndarray:
        """Log mu."""
        return self.sample.batch.rollout[self.place].astype(np.float64)

    @cached_property
    def usable(self) -> np.ndarray:
        """Where both log-probs are possible for a sampled token."""
        return likely(self.train) & likely(self.rollout)

    @cached_property
    def log_ratio(self) -> np.ndarray:
        """l, in [-20, 20]; 20 where it is not a number."""
        with np.errstate(invalid="ignore"):
            difference = (self.train - self.rollout).clip(-MISSING, MISSING)
        return np.where(np.isnan(difference), MISSING, difference)

    @cached_property
    def middle(self) -> np.ndarray:
        """The mean of the two log-probs: noise on either side moves it half as much, and equally."""
        return (self.train + self.rollout) / 2

    @cached_property
    def ratio(self) -> np.ndarray:
        """R = e^l."""
        return np.exp(self.log_ratio)

    @cached_property
    def energy(self) -> float:
        """The sum of l^2. A finding's share is a share of it."""
        return float((self.log_ratio**2).sum())

    @cached_property
    def row(self) -> np.ndarray:
        """The row in the sample."""
        return self.sample.row[self.place]

    @cached_property
    def position(self) -> np.ndarray:
        """The position within the response."""
        return self.sample.position[self.place]

    @cached_property
    def ids(self) -> np.ndarray | None:
        """Token ids."""
        return None if self.sample.batch.ids is None else self.sample.batch.ids[self.place]

    @cached_property
    def context(self) -> np.ndarray | None:
        """A number per shared context; -1 where no other row shares the context."""
        return None if self.sample.context is None else self.sample.context[self.place]

    @cached_property
    def last(self) -> np.ndarray:
        """Whether the token is its row's last response token."""
        ends = np.full(len(self.sample.batch), -1, np.int64)
        ends[self.sample.row[np.flatnonzero(self.sample.batch.mask)]] = self.sample.position[
            np.flatnonzero(self.sample.batch.mask)
        ]
        return self.position == ends[self.row]

    @cached_property
    def turn_starts(self) -> np.ndarray:
        """Whether the token is the first of its turn."""
        return self._turn_edges(0)

    @cached_property
    def turn_ends(self) -> np.ndarray:
        """Whether the token is the last of its turn."""
        return self._turn_edges(1)

    def _turn_edges(self, which: int) -> np.ndarray:
        mask, row = self.sample.batch.mask, self.sample.row
        joined = np.zeros(len(mask) + 1, bool)  # joined[i]: positions i - 1 and i are of one turn
        joined[1:-1] = mask[:-1] & mask[1:] & (row[:-1] == row[1:])
        return (mask & ~(joined[:-1], joined[1:])[which])[self.place]

    @cached_property
    def earlier(self) -> np.ndarray | None:
        """How often the token's id came before it in its response, tokens outside the mask included."""
        ids = self.sample.batch.ids
        if ids is None:
            return None
        row, position = self.sample.row, self.sample.position
        order = np.lexsort((position, ids, row))
        same = np.concatenate([[False], (np.diff(row[order]) == 0) & (np.diff(ids[order]) == 0)])
        index = np.arange(len(order))
        first = np.maximum.accumulate(np.where(same, 0, index))
        counts = np.empty(len(order), np.int64)
        counts[order] = index - first
        return counts[self.place]
