"""Rejection: which tokens pass each criterion, and the value of the statistic that it judged.

A token must pass every criterion. Each is judged on all response tokens of valid rows, including those that another
criterion rejects, so the order of the criteria does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_rollout_corr.grammar import Agg, Criterion, Scope, Stat, When
from verl_rollout_corr.maths import selection
from verl_rollout_corr.maths.log_ratio import TokenLogProbs, not_above, not_below, ratio
from verl_rollout_corr.maths.scopes import SeqUnits, Units, aggregate, units_of
from verl_rollout_corr.maths.selection import Candidates, Listed
from verl_rollout_corr.maths.statistics import statistic


@dataclass(frozen=True)
class Verdict:
    """The verdict of one criterion.

    `inside` (B, S) bool: units that pass. `value` (B, S): the aggregated statistic of each unit. For k1 it is the
    exponential, a ratio like the bounds, so that the two can be compared.
    """

    units: Units
    inside: Tensor
    value: Tensor

    @property
    def passes(self) -> Tensor:
        """(B, T) bool: tokens whose unit passes, meaningful at response tokens only."""
        return self.units.spread(self.inside)


def judge(
    criterion: Criterion,
    tokens: TokenLogProbs,
    advantages: Tensor | None,
    staleness: Tensor | None = None,
    *,
    leaves: Tensor | None = None,
) -> Verdict:
    """One criterion's verdict on a padded batch.

    `advantages` (B, T) are needed if the criterion has a `when`. `staleness` (B,): the lag of each row, -1 where it is
    unknown; None if no lag is known. `leaves` (B, T) bool, for the batch scope: the tokens that the whole batch
    rejects, if the tensors are only a part of it; None if they are the whole batch.
    """
    if criterion.stat is Stat.LAG:
        return _judge_lag(criterion, tokens, advantages, staleness)
    if criterion.scope is Scope.BATCH:
        return _judge_batch(criterion, tokens, advantages, leaves)
    judged = statistic(criterion.stat, tokens)
    units = units_of(criterion.scope, tokens.mask)
    value = aggregate(judged, units, criterion.agg)
    lower, upper = _limits(criterion)
    inside = not_above(value, upper, tokens.precision)
    if criterion.agg is Agg.MAX and lower is not None:
        # A maximum does not show whether a token is below the lower bound, so that bound is compared with each token.
        low = tokens.mask & ~not_below(judged, lower, tokens.precision)
        inside &= units.total(low) == 0
    elif lower is not None:
        inside &= not_below(value, lower, tokens.precision)
    if criterion.when is not None:
        inside |= ~_may_reject(criterion.when, tokens, units, advantages)
    return Verdict(units, inside, _shown(criterion, value))


def _shown(criterion: Criterion, value: Tensor) -> Tensor:
    return ratio(value) if criterion.stat is Stat.K1 else value


def _judge_lag(
    criterion: Criterion, tokens: TokenLogProbs, advantages: Tensor | None, staleness: Tensor | None
) -> Verdict:
    """Rows older than the bound fail. A row of unknown lag passes, and the mean and maximum of the lags omit it."""
    rows = SeqUnits(tokens.mask)
    lag = torch.full_like(rows.count, -1.0) if staleness is None else staleness.to(rows.count.dtype)[:, None]
    known = lag >= 0
    inside = ~known | not_above(lag, criterion.bounds.upper, torch.float64)
    if criterion.when is not None:
        inside |= ~_may_reject(criterion.when, tokens, rows, advantages)
    return Verdict(SeqUnits(tokens.mask & known), inside, lag)


def _judge_batch(
    criterion: Criterion, tokens: TokenLogProbs, advantages: Tensor | None, leaves: Tensor | None
) -> Verdict:
    units = units_of(criterion.scope, tokens.mask)
    value = aggregate(statistic(criterion.stat, tokens), units, None)
    if leaves is None:
        leaves = leave_at_once(criterion, tokens, advantages)
    return Verdict(units, ~leaves, _shown(criterion, value))


def _limits(criterion: Criterion) -> tuple[float | None, float | None]:
    """The bounds in the statistic's own scale. Bounds of k1 are on the ratio, so their logs are compared with l."""
    bounds = criterion.bounds
    if criterion.stat is not Stat.K1:
        return bounds.lower, bounds.upper
    return (
        None if bounds.lower is None else math.log(bounds.lower),
        None if bounds.upper is None else math.log(bounds.upper),
    )


def _may_reject(when: When, tokens: TokenLogProbs, units: Units, advantages: Tensor | None) -> Tensor:
    """(B, S) bool: units that the criterion may reject under its `when`, by the sign of their mean advantage.

    For `outward`, the mean advantage and the sum of l must have the same sign. Signs are compared because the product
    of the two may underflow.
    """
    assert advantages is not None  # checked at the door
    inside = torch.where(tokens.mask, advantages, torch.zeros_like(advantages))
    mean = units.total(inside) / units.count.clamp(min=1.0)
    if when is When.NEGATIVE_ADVANTAGE:
        return mean < 0
    if when is When.POSITIVE_ADVANTAGE:
        return mean > 0
    return mean.sign() * units.total(tokens.log_ratio).sign() > 0


def candidates(criterion: Criterion, tokens: TokenLogProbs, advantages: Tensor | None) -> Candidates:
    """What a criterion of the batch judges, (B, T).

    A token does not count in the mean outside the response and, for k1, where it has probability 0 and so no log-ratio.
    """
    without_ratio = criterion.stat is Stat.K1
    counts = tokens.finite if without_ratio else tokens.mask
    values = tokens.finite_log_ratio if without_ratio else statistic(criterion.stat, tokens)
    if criterion.when is None:
        return Candidates(values, counts, counts)
    units = units_of(criterion.scope, tokens.mask)
    return Candidates(values, counts, counts & _may_reject(criterion.when, tokens, units, advantages))


def listed(criterion: Criterion, tokens: TokenLogProbs, advantages: Tensor | None) -> Listed:
    """What `leave` needs of a part of the batch. Waits for the device."""
    return selection.listed(candidates(criterion, tokens, advantages), _upper(criterion))


def leave(criterion: Criterion, parts: Sequence[Listed], precision: torch.dtype) -> list[Tensor]:
    """For each part (B, T) bool: the tokens that leave, largest statistic first, until the rest meets the bound.

    The masking form of M2PO (arXiv 2510.01161) for k2 at tau / 2. `parts` are all of the batch in their order; equal
    values leave in the order of row, then position. Tokens that `when` protects stay and count in the mean. Nothing
    stays if no token meets the bound.
    """
    return selection.leaving(parts, _upper(criterion), _fits(criterion, precision))


def leave_at_once(criterion: Criterion, tokens: TokenLogProbs, advantages: Tensor | None) -> Tensor:
    """The same of all of the batch, without waiting for the device."""
    whole, fits = candidates(criterion, tokens, advantages), _fits(criterion, tokens.precision)
    return selection.leaving_at_once(whole, _upper(criterion), fits)


def _upper(criterion: Criterion) -> float:
    _, upper = _limits(criterion)
    assert upper is not None  # a criterion of the batch has no other bound
    return upper


def _fits(criterion: Criterion, precision: torch.dtype) -> selection.Fits:
    return lambda total, count: not_above(total / count.clamp(min=1), _upper(criterion), precision)
