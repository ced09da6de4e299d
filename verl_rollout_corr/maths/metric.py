"""One metric: what a row of the tables of metrics says, and the formulas that its rows use.

A formula gets the values of the row's sums over the whole batch. Over nothing, a metric is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from verl_rollout_corr.maths.sum_table import Family, Sum, named

PREFIX = "rollout_corr/"
"""What the name of every metric starts with."""


@dataclass(frozen=True)
class Metric:
    """One row of the tables of metrics.

    `name`: without the prefix; `{...}` stands for a criterion or a bin. `definition`: how it is computed. `meaning`:
    what its value tells. `source`: where the name or the quantity comes from; "verl" where verl's name is kept.
    `formula`: from the values of `sums`, in that order, to the metric; None for what the hook adds in a run of verl.
    """

    name: str
    definition: str
    range: str
    meaning: str
    source: str
    sums: tuple[Sum, ...] = ()
    formula: Callable[..., float] | None = None

    @property
    def family(self) -> Family:
        """The family of its sums: the metric has one value for each member."""
        families = {row.family for row in self.sums} - {Family.BATCH}
        return families.pop() if families else Family.BATCH if self.sums else Family.RUN

    def at(self, label: str) -> str:
        """The name of the value for one member of the family, with the prefix."""
        return PREFIX + named(self.name, label)


def mean(total: float, count: float) -> float:
    """Total / count; 0 over nothing."""
    return total / count if count else 0.0


def mean_off_one(total: float, count: float) -> float:
    """The mean minus 1."""
    return total / count - 1 if count else 0.0


def mean_k3(k3: float, tokens: float, finite: float) -> float:
    """The mean k3: +inf if some token has probability 0 under pi_train, because its k3 is infinite."""
    return math.inf if finite < tokens else mean(k3, tokens)


def largest(maximum: float, count: float) -> float:
    """The maximum over `count` values, 0 if there are none."""
    return maximum if count else 0.0


def smallest(negated: float, count: float) -> float:
    """The minimum over `count` values, from the maximum of the negated ones; 0 if there are none."""
    return -negated if count else 0.0


def share_missing(part: float, whole: float) -> float:
    """The share of the whole that is not in the part."""
    return (whole - part) / whole if whole else 0.0


def deviation(off_one: float, off_one_square: float, count: float) -> float:
    """The population standard deviation from moments about 1."""
    about_one = mean(off_one_square, count)
    variance = about_one - mean(off_one, count) ** 2
    # A difference this small is rounding error of the two moments. It would depend on how the batch was cut.
    return math.sqrt(variance) if variance > 1e-13 * about_one else 0.0


def effective_size(total: float, square: float, count: float) -> float:
    """Kish's effective sample size over `count`: 1 if all weights are equal; 0 if all are 0."""
    return min(total**2 / (count * square), 1.0) if count and square else 0.0


def pearson(
    tokens: float,
    frequent: float,
    rare_p: float,
    rare_q: float,
    frequent_p: float,
    frequent_q: float,
    square_p: float,
    square_q: float,
    product: float,
) -> float:
    """The correlation of the probabilities from moments about 0 and 1; 0 where one side does not vary."""
    if not tokens:
        return 0.0
    parts = ((tokens - frequent, 0.0, rare_p, rare_q), (frequent, 1.0, frequent_p, frequent_q))
    mean_p = math.fsum((frequent, rare_p, frequent_p)) / tokens
    mean_q = math.fsum((frequent, rare_q, frequent_q)) / tokens
    var_p, var_q, covariance, size_p, size_q = square_p, square_q, product, square_p, square_q
    for count, centre, p, q in parts:
        off_p, off_q = centre - mean_p, centre - mean_q
        var_p += 2 * off_p * p + count * off_p * off_p
        var_q += 2 * off_q * q + count * off_q * off_q
        covariance += off_q * p + off_p * q + count * off_p * off_q
        size_p, size_q = size_p + count * off_p * off_p, size_q + count * off_q * off_q
    # A variance far smaller than the moments that it is computed from is mostly rounding error, and would depend on how
    # the batch was cut into micro-batches.
    # Frequent tokens have their moments about 1: below 1e-26 per token, a variance is float64's rounding of that 1.
    least = 1e-26 * frequent
    if var_p <= max(1e-7 * size_p, least) or var_q <= max(1e-7 * size_q, least):
        return 0.0
    return min(max(covariance / math.sqrt(var_p * var_q), -1.0), 1.0)
