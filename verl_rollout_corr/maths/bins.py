"""Bins: groups of the tokens of a batch, by the engine's probability, by position and by staleness."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bins:
    """One partition of the response tokens.

    `edges`: the values at which one bin ends and the next begins; a value on an edge belongs to the bin above it.
    `labels`: the names of the bins, lowest first. There is one more label than there are edges.
    """

    kind: str
    of: str
    edges: tuple[float, ...]
    labels: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """What the bins are called in the names of sums and metrics, from below."""
        return tuple(f"{self.kind}/{label}" for label in self.labels)


PROBABILITY = Bins(
    "by_prob",
    "mu(a_t), from the edge named first up to the one named second",
    (0.01, 0.1, 0.5, 0.9),
    ("0_0.01", "0.01_0.1", "0.1_0.5", "0.5_0.9", "0.9_1"),
)
"""By mu(a_t): rare tokens have the largest log-ratios, frequent ones the largest differences of probability."""

POSITION = Bins(
    "by_position",
    "the number of response tokens before the token in its row",
    (16, 64, 256, 1024, 4096, 16384),
    ("0_15", "16_63", "64_255", "256_1023", "1024_4095", "4096_16383", "16384_up"),
)
"""By the number of response tokens before the token in its row."""

STALENESS = Bins(
    "by_staleness",
    "published versions of the weights between those that sampled the row and the trainer's",
    (0, 1, 2, 3, 5, 9),
    ("unknown", "lag_0", "lag_1", "lag_2", "lag_3_4", "lag_5_8", "lag_9_up"),
)
"""By the lag of the row. A lag of -1 is unknown; where a batch has no lags, every row's is."""

BINS: tuple[Bins, ...] = (PROBABILITY, POSITION, STALENESS)
"""Every partition."""

BIN_NAMES: tuple[str, ...] = tuple(name for bins in BINS for name in bins.names)
"""Every bin of every partition, in the order of their sums."""
