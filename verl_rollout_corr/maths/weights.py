"""Importance weights: the raw ratio of each level, its bounds, and the normalisation.

E_mu[w f] = E_pi[f] holds without bounds for `seq_sum` and any f; for `prefix_sum` and an f_t that depends on the tokens
up to t; for `token` only where nothing before t depends on the policy (T = 1). `*_mean` levels are biased, and so are
bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verl_rollout_corr.grammar import LEVELS, Agg, Bounds, Level, Outside, Weights
from verl_rollout_corr.maths.log_ratio import TokenLogProbs, not_above, not_below, ratio
from verl_rollout_corr.maths.scopes import TokenUnits, Units, aggregate, units_of


@dataclass(frozen=True)
class AppliedWeights:
    """Weights of `units`, (B, S) float64: `raw` before and `applied` after bounds and normalisation, 0 in other slots.

    `high` and `low` (B, S) bool: raw weights beyond each bound.
    """

    units: Units
    raw: Tensor
    applied: Tensor
    high: Tensor
    low: Tensor

    def per_token(self, mask: Tensor) -> Tensor:
        """(B, T) float32: gives each response token the weight of its unit, and 0 to other positions."""
        if isinstance(self.units, TokenUnits):
            return self.applied.float()
        return torch.where(mask, self.units.spread(self.applied).float(), 0.0)


_AGGS: dict[Level, Agg] = {
    Level.TURN_SUM: Agg.SUM,
    Level.TURN_MEAN: Agg.MEAN,
    Level.SEQ_SUM: Agg.SUM,
    Level.SEQ_MEAN: Agg.MEAN,
}


def raw_weights(level: Level, tokens: TokenLogProbs) -> tuple[Units, Tensor]:
    """The units of a level and their raw weights, (B, S); 0 in slots that are not units."""
    units = units_of(LEVELS[level].unit, tokens.mask)
    if level is Level.TOKEN:
        return units, tokens.ratio
    prefix = level is Level.PREFIX_SUM
    exponent = _prefix_sum(tokens) if prefix else aggregate(tokens.log_ratio, units, _AGGS[level])
    return units, torch.where(units.exists, ratio(exponent), 0.0)


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


def weigh(config: Weights, tokens: TokenLogProbs, keep: Tensor, *, mean: Tensor | None = None) -> AppliedWeights:
    """The weights of a padded batch: truncated at the bounds, or masked to 0 outside them (IcePop, MIS).

    `keep` (B, T) bool is what rejection left; only `normalize: batch` uses it. `mean`: a scalar, the mean weight of the
    whole batch, if the tensors are only a part of it; None if they are the whole batch.
    """
    units, raw = raw_weights(config.level, tokens)
    high = units.exists & ~not_above(raw, config.bounds.upper, tokens.precision)
    low = units.exists & ~not_below(raw, config.bounds.lower, tokens.precision)
    if config.outside is Outside.MASK:
        applied = torch.where(high | low, 0.0, raw)
    elif config.bounds.lower is None:
        applied = truncated(raw, config.bounds)
    else:
        applied = torch.where(units.exists, truncated(raw, config.bounds), 0.0)
    weights = AppliedWeights(units=units, raw=raw, applied=applied, high=high, low=low)
    if config.normalize is None:
        return weights
    if mean is None:
        total, count = kept_total(weights, keep)
        mean = total / count.clamp(min=1)
    return replace(weights, applied=_normalised(applied, mean, config.bounds.upper))


def kept_total(weights: AppliedWeights, keep: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the applied weights over units with a kept token, and their number: scalars, which add over parts."""
    kept = weights.units.total(keep) > 0
    return torch.where(kept, weights.applied, 0.0).sum(), kept.sum()


def _normalised(applied: Tensor, mean: Tensor, upper: float | None) -> Tensor:
    """Divides by the mean, then applies `upper` again so that no weight exceeds it."""
    scaled = torch.where(mean > 1e-8, applied / mean.clamp(min=1e-8), applied)
    return scaled if upper is None else scaled.clamp(max=upper)
