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
from verl_rollout_corr.maths.scopes import Units, aggregate, units_of
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


def judge(criterion: Criterion, tokens: TokenLogProbs, advantages: Tensor | None) -> Verdict:
    """One criterion's verdict on a padded batch. `advantages` (B, T) are needed where the criterion has a `when`."""
    statistic = STATISTICS[criterion.stat](tokens)
    units = units_of(criterion.scope, tokens.mask)
    if criterion.scope is Scope.BATCH:
        passes = _trim(statistic, tokens, criterion, advantages)
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
        if criterion.when is not None:
            assert advantages is not None  # checked at the door
            inside |= ~_may_reject(criterion.when, advantages, units, tokens.mask)
        passes = units.spread(inside.to(torch.int8)).bool()
    return Verdict(passes=passes, units=units, value=ratio(value) if criterion.stat is Stat.K1 else value)


def _limits(criterion: Criterion) -> tuple[float | None, float | None]:
    """The bounds in the statistic's own scale: of k1 they bound the ratio, so their logs are compared with l."""
    bounds = criterion.bounds
    if criterion.stat is not Stat.K1:
        return bounds.lower, bounds.upper
    return (
        None if bounds.lower is None else math.log(bounds.lower),
        None if bounds.upper is None else math.log(bounds.upper),
    )


def _may_reject(when: When, advantages: Tensor, units: Units, mask: Tensor) -> Tensor:
    """(B, S) bool: units whose mean advantage has the sign that `when` names."""
    inside = torch.where(mask, advantages, torch.zeros_like(advantages))
    mean = units.total(inside) / units.count.clamp(min=1.0)
    return mean < 0 if when is When.NEGATIVE_ADVANTAGE else mean > 0


def _trim(statistic: Tensor, tokens: TokenLogProbs, criterion: Criterion, advantages: Tensor | None) -> Tensor:
    """(B, T) bool: what is left after the largest statistics leave, until the mean of the rest is <= upper.

    The masking form of M2PO (arXiv 2510.01161) for k2 at tau / 2. Ties leave in the order of row, then position. Tokens
    that `when` protects stay and count in the mean. Nothing stays if no token meets the bound.
    """
    judged = tokens.mask.flatten()
    may_leave = judged
    if criterion.when is not None:
        assert advantages is not None
        sign = advantages < 0 if criterion.when is When.NEGATIVE_ADVANTAGE else advantages > 0
        may_leave = judged & sign.flatten()
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
