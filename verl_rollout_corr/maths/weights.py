"""Importance weights: the raw ratio of each level, its bounds, and the normalisation.

E_mu[w f] = E_pi[f] holds without bounds for `seq_sum` and any f; for `prefix_sum` and an f_t that depends on the tokens
up to t; for `token` only where nothing before t depends on the policy (T = 1). `*_mean` levels are biased, and so are
bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verl_rollout_corr.grammar import LEVELS, Agg, Bounds, Level, Outside, Scope, Weights
from verl_rollout_corr.maths.log_ratio import TokenLogProbs, not_above, not_below, ratio
from verl_rollout_corr.maths.scopes import Units, aggregate, units_of


@dataclass(frozen=True)
class AppliedWeights:
    """Weights of `units`, (B, S) float64: `raw` before and `applied` after bounds and normalisation.

    `high` and `low` (B, S) bool: raw weights beyond each bound.
    """

    units: Units
    raw: Tensor
    applied: Tensor
    high: Tensor
    low: Tensor

    def per_token(self, mask: Tensor) -> Tensor:
        """(B, T) float32: each response token the weight of its unit, 0 elsewhere."""
        return torch.where(mask, self.units.spread(self.applied), torch.zeros_like(mask, dtype=torch.float64)).float()


_AGGS: dict[Level, Agg | None] = {
    Level.TOKEN: None,
    Level.TURN_SUM: Agg.SUM,
    Level.TURN_MEAN: Agg.MEAN,
    Level.SEQ_SUM: Agg.SUM,
    Level.SEQ_MEAN: Agg.MEAN,
}


def raw_exponent(level: Level, tokens: TokenLogProbs) -> tuple[Units, Tensor]:
    """The units of a level and the log of their raw weights, (B, S); -inf where a factor is 0."""
    if level is Level.PREFIX_SUM:
        units = units_of(Scope.TOKEN, tokens.mask)
        return units, aggregate(_prefix_sum(tokens), units, tokens.mask, None)
    units = units_of(LEVELS[level].unit, tokens.mask)
    return units, aggregate(tokens.log_ratio, units, tokens.mask, _AGGS[level])


def _prefix_sum(tokens: TokenLogProbs) -> Tensor:
    """(B, T): sum of l over the response tokens j <= t of the row; -inf from the first token of probability 0 on."""
    log_ratio = tokens.log_ratio
    impossible = log_ratio == -torch.inf
    total = torch.where(impossible, torch.zeros_like(log_ratio), log_ratio).cumsum(dim=1)
    return torch.where(impossible.long().cumsum(dim=1) > 0, torch.full_like(total, -torch.inf), total)


def truncated(weights: Tensor, bounds: Bounds) -> Tensor:
    """min(max(w, lower), upper): truncated importance sampling (TIS)."""
    if bounds.lower is None and bounds.upper is None:
        return weights
    return weights.clamp(min=bounds.lower, max=bounds.upper)


def weigh(spec: Weights, tokens: TokenLogProbs, keep: Tensor) -> AppliedWeights:
    """The weights of a padded batch: truncated at the bounds, or masked to 0 outside them (IcePop, MIS).

    `keep` (B, T) bool is what rejection left: only `normalize: batch` looks at it.
    """
    units, exponent = raw_exponent(spec.level, tokens)
    raw = ratio(exponent)
    high = ~not_above(raw, spec.bounds.upper, tokens.precision)
    low = ~not_below(raw, spec.bounds.lower, tokens.precision)
    if spec.outside is Outside.MASK:
        applied = torch.where(high | low, torch.zeros_like(raw), raw)
    else:
        applied = truncated(raw, spec.bounds)
    if spec.normalize is not None:
        applied = _normalised(applied, units, keep, spec.bounds.upper)
    return AppliedWeights(units=units, raw=raw, applied=applied, high=high, low=low)


def _normalised(applied: Tensor, units: Units, keep: Tensor, upper: float | None) -> Tensor:
    """Divides by the mean over units with a kept token, then applies `upper` again so that no weight exceeds it."""
    kept = units.exists & (units.total(keep.to(torch.float64)) > 0)
    total = torch.where(kept, applied, torch.zeros_like(applied)).sum()
    mean = total / kept.sum().clamp(min=1)
    scaled = torch.where(mean > 1e-8, applied / mean.clamp(min=1e-8), applied)
    return scaled if upper is None else scaled.clamp(max=upper)
