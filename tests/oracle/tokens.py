"""What the rules say about one token and about the units that tokens form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import cached_property

INF = math.inf


def log_ratio(train: float, rollout: float) -> float:
    """l = log pi_train - log mu; -inf where the trainer gives the token no chance."""
    return -INF if train == -INF else train - rollout


def exp_ratio(x: float) -> float:
    """The exponential of a log-ratio: 0 for -inf, else of the exponent clipped to [-20, 20]."""
    return 0.0 if x == -INF else math.exp(min(max(x, -20.0), 20.0))


FLOOR = Decimal(2) ** -24


def bernoulli_kl(log_p: float, log_q: float) -> float:
    """KL(Bern(p) || Bern(q)) with 0 log 0 = 0, to forty digits: no underflow of p and no cancellation for p near q.

    The complements 1 - p and 1 - q are at least 2^-24.
    """
    with localcontext() as context:
        context.prec = 40
        a, b = Decimal(log_p), Decimal(log_q)
        p, q = a.exp(), b.exp()
        total = Decimal(0)
        if p > 0:
            total += p * (a - b) if q > 0 else Decimal("Infinity")
        not_p, not_q = max(1 - p, FLOOR), max(1 - q, FLOOR)
        return float(total + not_p * (not_p.ln() - not_q.ln()))


def k3(x: float) -> float:
    """r - 1 - l; by its series where the difference would cancel."""
    if x == -INF:
        return INF
    if abs(x) < 1e-3:
        return x * x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6))))
    return max(0.0, math.expm1(min(max(x, -20.0), 20.0)) - min(x, 1e8))


def statistic(stat: str, train: float, rollout: float) -> float:
    """One row of the table of statistics, per token."""
    x = log_ratio(train, rollout)
    if stat == "k1":
        return x
    if stat == "k2":
        return 0.5 * x * x
    if stat == "k3":
        return k3(x)
    if stat == "abs":
        return 1.0 if x == -INF else abs(math.expm1(min(max(x, -20.0), 20.0)))
    if stat == "tv":
        return abs(math.exp(train) - math.exp(rollout))
    if stat == "bkl":
        return max(bernoulli_kl(min(train, 0.0), min(rollout, 0.0)), bernoulli_kl(min(rollout, 0.0), min(train, 0.0)))
    if stat == "bkl_mu":
        return bernoulli_kl(min(rollout, 0.0), min(train, 0.0))
    raise AssertionError(stat)


def total(values: Sequence[float]) -> float:
    """A sum in which an infinity wins."""
    infinite = [v for v in values if math.isinf(v)]
    return infinite[0] if infinite else math.fsum(values)


def mean(values: Sequence[float]) -> float:
    """A mean; 0 over nothing."""
    return total(values) / len(values) if values else 0.0


def aggregate(stat: str, agg: str | None, values: Sequence[float]) -> float:
    """One number for a unit. One -inf rules a sum and a mean: the product and the geometric mean are 0."""
    if agg is None:
        return values[0]
    if agg == "sum":
        return total(values)
    if agg == "max":
        return max(values)
    return mean(values)


@dataclass
class Row:
    """The response tokens of one row: their positions, and per token the two log-probs and the advantage."""

    index: int
    positions: list[int]
    train: list[float]
    rollout: list[float]
    advantages: list[float]
    group: object
    lag: int
    invalid: bool

    @cached_property
    def l(self) -> list[float]:  # noqa: E743 - the letter of the formulas
        return [log_ratio(p, q) for p, q in zip(self.train, self.rollout, strict=True)]

    def units(self, scope: str) -> list[list[int]]:
        """Indices into this row's lists, one list for each token, turn or sequence."""
        if scope == "token":
            return [[i] for i in range(len(self.positions))]
        if scope == "seq":
            return [list(range(len(self.positions)))] if self.positions else []
        turns: list[list[int]] = []
        for i, position in enumerate(self.positions):
            if i == 0 or position != self.positions[i - 1] + 1:
                turns.append([])
            turns[-1].append(i)
        return turns


def is_invalid(train: float, rollout: float) -> bool:
    """NaN, an engine that sampled what it gives next to no chance, +inf, or a probability clearly above 1."""
    if math.isnan(train) or math.isnan(rollout) or rollout < -100:
        return True
    return train > 1e-3 or rollout > 1e-3
