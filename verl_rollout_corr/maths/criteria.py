"""Rejection: which tokens each criterion would let pass, and the statistic that it judged.

Criteria are a conjunction, each judged on all response tokens of valid rows, never on what another criterion left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_rollout_corr.grammar import Agg, Criterion, Scope, Stat, When
from verl_rollout_corr.maths.log_ratio import TokenLogProbs, not_above, not_below, ratio
from verl_rollout_corr.maths.scopes import Units, aggregate, seq_units, units_of
from verl_rollout_corr.maths.statistics import STATISTICS


@dataclass(frozen=True)
class Verdict:
    """What one criterion says.

    `passes` (B, T) bool, meaningful at response tokens. `units` and `value` (B, S): the aggregated statistic of each
    unit, for k1 its exponential, so that it can be held against the bounds.
    """

    passes: Tensor
    units: Units
    value: Tensor


def judge(
    criterion: Criterion, tokens: TokenLogProbs, advantages: Tensor | None, staleness: Tensor | None = None
) -> Verdict:
    """One criterion's verdict on a padded batch.

    `advantages` (B, T) are needed where the criterion has a `when`. `staleness` (B,): the lag of each row, -1 where it
    is not known; None: of no row.
    """
    if criterion.stat is Stat.LAG:
        return _judge_lag(criterion, tokens, advantages, staleness)
    statistic = STATISTICS[criterion.stat](tokens)
    units = units_of(criterion.scope, tokens.mask)
    if criterion.scope is Scope.BATCH:
        passes = _trim(statistic, tokens, criterion, _may_reject(criterion.when, tokens, units, advantages))
        value = aggregate(statistic, units, tokens.mask, None)
    else:
        value = aggregate(statistic, units, tokens.mask, criterion.agg)
        lower, upper = _limits(criterion)
        inside = not_above(value, upper, tokens.precision)
        if criterion.agg is Agg.MAX:
            # The maximum says nothing about the tokens below the lower bound: the veto looks at each.
            low = tokens.mask & ~not_below(statistic, lower, tokens.precision)
            inside &= units.total(low.to(torch.float64)) == 0
        else:
            inside &= not_below(value, lower, tokens.precision)
        inside |= ~_may_reject(criterion.when, tokens, units, advantages)
        passes = units.spread(inside.to(torch.int8)).bool()
    return Verdict(passes=passes, units=units, value=ratio(value) if criterion.stat is Stat.K1 else value)


def _judge_lag(
    criterion: Criterion, tokens: TokenLogProbs, advantages: Tensor | None, staleness: Tensor | None
) -> Verdict:
    """Rows older than the bound fail. One of unknown lag passes, and is not a unit: no mean or maximum has its lag."""
    rows = seq_units(tokens.mask)
    lag = rows.count.new_full(rows.count.shape[:1], -1.0) if staleness is None else staleness.to(rows.count.dtype)
    known = (lag >= 0)[:, None]
    value = lag[:, None].expand_as(rows.count)
    inside = ~known | not_above(value, criterion.bounds.upper, torch.float64)
    inside |= ~_may_reject(criterion.when, tokens, rows, advantages)
    units = Units(index=rows.index, count=torch.where(known, rows.count, torch.zeros_like(rows.count)))
    return Verdict(passes=rows.spread(inside.to(torch.int8)).bool(), units=units, value=value)


def _limits(criterion: Criterion) -> tuple[float | None, float | None]:
    """The bounds in the statistic's own scale: of k1 they bound the ratio, so their logs are compared with l."""
    bounds = criterion.bounds
    if criterion.stat is not Stat.K1:
        return bounds.lower, bounds.upper
    return (
        None if bounds.lower is None else math.log(bounds.lower),
        None if bounds.upper is None else math.log(bounds.upper),
    )


def _may_reject(when: When | None, tokens: TokenLogProbs, units: Units, advantages: Tensor | None) -> Tensor:
    """(B, S) bool: units that `when` leaves to the criterion, by the sign of their mean advantage.

    Outward: by the signs of the mean advantage and of the sum of l, not by their product, which may underflow.
    """
    if when is None:
        return units.exists
    assert advantages is not None  # checked at the door
    inside = torch.where(tokens.mask, advantages, torch.zeros_like(advantages))
    mean = units.total(inside) / units.count.clamp(min=1.0)
    if when is When.NEGATIVE_ADVANTAGE:
        return mean < 0
    if when is When.POSITIVE_ADVANTAGE:
        return mean > 0
    return mean.sign() * units.total(tokens.log_ratio).sign() > 0


def _trim(statistic: Tensor, tokens: TokenLogProbs, criterion: Criterion, may_reject: Tensor) -> Tensor:
    """(B, T) bool: what is left after the largest statistics leave, until the mean of the rest is <= upper.

    The masking form of M2PO (arXiv 2510.01161) for k2 at tau / 2. Ties leave in the order of row, then position. Tokens
    that `when` protects stay and count in the mean. Nothing stays if no token meets the bound.
    """
    judged = tokens.mask.flatten()
    may_leave = judged & may_reject[:, :-1].flatten()
    values = torch.where(judged, statistic.flatten(), torch.zeros_like(statistic.flatten()))
    # A token without a log-ratio (k1 of probability 0) is no term of the mean.
    counted = judged & (values != -torch.inf)
    values = torch.where(counted, values, torch.zeros_like(values))
    leaving = may_leave & counted
    fixed_sum = torch.where(counted & ~leaving, values, torch.zeros_like(values)).sum()
    fixed_count = (counted & ~leaving).sum()
    order = torch.argsort(torch.where(leaving, values, -torch.inf), descending=True, stable=True)
    sorted_values = torch.where(leaving[order], values[order], torch.zeros_like(values))
    # Sums of what stays are taken from the small end: subtracting from the total would lose them beside a huge value.
    rest_sum = sorted_values.flip(0).cumsum(0).flip(0) + fixed_sum
    rest_count = leaving[order].flip(0).cumsum(0).flip(0) + fixed_count
    fits = not_above(rest_sum / rest_count.clamp(min=1), _limits(criterion)[1], tokens.precision)
    # The first position from which the rest fits: everything before it leaves.
    leaves_sorted = fits.long().cumsum(0) == 0
    leaves = torch.zeros_like(judged).scatter(0, order, leaves_sorted) & leaving
    return (~leaves).view_as(tokens.mask)
