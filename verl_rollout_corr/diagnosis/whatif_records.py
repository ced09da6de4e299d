"""The records of what a configuration would have done to a dump."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ByLength:
    """Sequences of one range of lengths, and those of which every token is rejected."""

    label: str
    sequences: int
    dropped: int


@dataclass(frozen=True)
class Row:
    """A row that loses tokens: `rejected` of its `tokens`, by which criteria."""

    step: int
    row: int
    uid: str | None
    tokens: int
    rejected: int
    mean_log_ratio: float
    by: tuple[str, ...]


@dataclass(frozen=True)
class Gradient:
    """Compares coefficients c_t of the surrogate gradient, by which the loss multiplies grad log pi: A_t without
    correction, A_t r_t with unbounded token weights, and A_t w_t keep_t with this configuration.

    bias: |sum (c - A r)| / sum |A r|, over tokens; none: the same without any correction. variance: that of c over
        tokens, divided by that of A r. cosine: of the vectors c and A r.
    """

    bias: float
    bias_without: float
    variance: float
    cosine: float


@dataclass(frozen=True)
class WhatIf:
    """What a configuration does to a dump. Fractions are of response tokens, of sequences with a response token and of
    groups with one; `ess` is that of the applied weights. `gradient` is None where the dump has no advantages.
    """

    label: str
    config: dict[str, Any]
    tokens: int
    sequences: int
    groups: int
    kept_tokens: float
    touched_sequences: float
    dropped_sequences: float
    kept_groups: float
    invalid_sequences: float
    ess: float
    weight_mean: float
    weight_quantiles: dict[str, float]
    rejected_by: dict[str, float]
    by_length: tuple[ByLength, ...]
    gradient: Gradient | None
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
