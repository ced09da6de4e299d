"""The sums of a corrected batch: how each row of `sum_table.py` is computed.

Nothing here synchronises with the host. Outside the response, the log-probs in `TokenLogProbs` are 0, and so are the
statistics computed from them; so a sum over the response tokens is a plain sum over all positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_rollout_corr.grammar import Agg, RolloutCorrConfig, Stat
from verl_rollout_corr.maths import sum_table as s
from verl_rollout_corr.maths.bins import BIN_NAMES, POSITION, PROBABILITY, STALENESS
from verl_rollout_corr.maths.criteria import Verdict
from verl_rollout_corr.maths.histogram import COUNT, bin_index
from verl_rollout_corr.maths.log_ratio import TokenLogProbs, ratio
from verl_rollout_corr.maths.statistics import statistic
from verl_rollout_corr.maths.sum_table import Sum, layout
from verl_rollout_corr.maths.sums import Sums
from verl_rollout_corr.maths.weights import AppliedWeights

SUSPICIOUS_LOG_PROB = -1e-3
"""An exact 0.0 on one side is suspicious if the other side is below this, because some programs store a missing
log-prob as 0.0."""

CONSTANT_FROM = 8
"""In a shorter row, all tokens may have the same log-prob by chance; such a row is not counted as constant."""

Values = dict[Sum, Tensor]
"""For each row of the table its entries: a scalar, or one value for each member of the row's family."""


@dataclass(frozen=True)
class Outcome:
    """What `decide` found, before it is summed up. All are (B, T) bool unless stated otherwise.

    `mask`: response tokens. `tokens`: log-probs, masked to the valid rows. `invalid` (B,): rows with an invalid one.
    """

    mask: Tensor
    tokens: TokenLogProbs
    invalid: Tensor
    keep: Tensor
    verdicts: tuple[Verdict, ...]
    weights: AppliedWeights | None
    staleness: Tensor | None


@dataclass(frozen=True)
class _Parts:
    """Values that are summed over tokens, per bin and per row. (B, T) float64, finite, and 0 outside the response."""

    n: Tensor
    finite: Tensor
    log_ratio: Tensor
    k3: Tensor
    tv: Tensor


def collect(outcome: Outcome, config: RolloutCorrConfig) -> Sums:
    """The sums of one corrected batch, in the layout of `config`."""
    entries = layout(config)
    tokens = outcome.tokens
    finite, zero = tokens.finite, torch.zeros((), dtype=torch.float64, device=tokens.mask.device)
    parts = _Parts(
        n=tokens.mask.double(),
        finite=finite.double(),
        log_ratio=torch.where(finite, tokens.log_ratio, zero),
        k3=torch.where(finite, statistic(Stat.K3, tokens), zero),
        tv=statistic(Stat.TV, tokens),
    )
    values: Values = _rejection(outcome)
    values |= _tokens(tokens, parts) | _moments(tokens) | _sequences(tokens, parts) | _lags(outcome.staleness, parts)
    if entries.bins:
        values |= _bins(outcome, parts)
    if entries.criteria:
        values |= _criteria(config, outcome) | _unknown_lags(outcome)
    if outcome.weights is not None:
        values |= _weights(outcome.weights)
    return Sums.of(entries, values)


def _maximum(values: Tensor, where: Tensor) -> Tensor:
    """The maximum of the values where `where` is True; -inf if it is True nowhere, or if the tensor is empty."""
    if not values.numel():
        return values.new_full((), -torch.inf)
    return torch.where(where, values, -torch.inf).max()


def _largest(values: Tensor, where: Tensor) -> Tensor:
    """The same as `_maximum`, for values that are at least 0 and are exactly 0 where `where` is False."""
    if not values.numel():
        return values.new_full((), -torch.inf)
    return torch.where(where.any(), values.max(), -torch.inf)


def _total(values: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, values, 0.0).sum()


def _rejection(outcome: Outcome) -> Values:
    rejected = outcome.mask & ~outcome.keep
    nonempty = outcome.mask.any(dim=1)
    return {
        s.ALL_TOKENS: outcome.mask.sum(),
        s.ALL_SEQS: nonempty.sum(),
        s.REJECTED_TOKENS: rejected.sum(),
        s.TOUCHED_SEQS: rejected.any(dim=1).sum(),
        s.DROPPED_SEQS: (nonempty & ~outcome.keep.any(dim=1)).sum(),
        s.INVALID_SEQS: outcome.invalid.sum(),
    }


def _tokens(tokens: TokenLogProbs, parts: _Parts) -> Values:
    mask = tokens.mask
    bins = bin_index(tokens.log_ratio)
    return {
        s.TOKENS: mask.sum(),
        s.FINITE: tokens.finite.sum(),
        s.KL: -parts.log_ratio.sum(),
        s.K3: parts.k3.sum(),
        s.ABS: statistic(Stat.ABS, tokens).sum(),
        s.RATIO_SQUARED: _total(tokens.ratio.square(), mask),
        s.PROB_DIFF: parts.tv.sum(),
        s.PROB_DIFF_MAX: _largest(parts.tv, mask),
        s.ZERO_ROLLOUT: (mask & (tokens.rollout == 0) & (tokens.train < SUSPICIOUS_LOG_PROB)).sum(),
        s.ZERO_TRAIN: (mask & (tokens.train == 0) & (tokens.rollout < SUSPICIOUS_LOG_PROB)).sum(),
        s.LOG_RATIOS: _per_bin(COUNT, bins, mask.long()),
    }


def _moments(tokens: TokenLogProbs) -> Values:
    # Outside the response both probabilities are exp(0) = 1; their distance from the centre, which is 1, is 0.
    centre = (tokens.rollout_probability >= 0.5).double()
    p, q, rare = tokens.train_probability - centre, tokens.rollout_probability - centre, 1 - centre
    return {
        s.FREQUENT: (tokens.mask & (centre > 0)).sum(),
        s.RARE_P: (rare * p).sum(),
        s.RARE_Q: (rare * q).sum(),
        s.FREQUENT_P: (centre * p).sum(),
        s.FREQUENT_Q: (centre * q).sum(),
        s.SQUARE_P: (p * p).sum(),
        s.SQUARE_Q: (q * q).sum(),
        s.PRODUCT_PQ: (p * q).sum(),
    }


def _sequences(tokens: TokenLogProbs, parts: _Parts) -> Values:
    count = parts.finite.sum(dim=1)
    some, exists = count > 0, tokens.mask.any(dim=1)
    mean_train = torch.where(tokens.finite, tokens.train, 0.0).sum(dim=1) / count.clamp(min=1)
    mean_rollout = (parts.finite * tokens.rollout).sum(dim=1) / count.clamp(min=1)
    gap = mean_rollout - mean_train
    product = ratio(tokens.log_ratio.sum(dim=1))
    return {
        s.SEQS: exists.sum(),
        s.FINITE_SEQS: some.sum(),
        s.SEQ_TRAIN: -mean_train.sum(),
        s.SEQ_ROLLOUT: -mean_rollout.sum(),
        s.SEQ_TRAIN_PPL: _total(ratio(-mean_train), some),
        s.SEQ_ROLLOUT_PPL: _total(ratio(-mean_rollout), some),
        s.SEQ_GAP: gap.sum(),
        s.SEQ_ABS_GAP: gap.abs().sum(),
        s.SEQ_PPL_RATIO: _total(ratio(gap), some),
        s.SEQ_RATIO_SQUARED: _total(product.square(), exists),
        s.CONSTANT_ROLLOUT: _constant_rollout(tokens),
        s.SEQ_GAP_MAX: _maximum(gap, some),
        s.SEQ_NEGATED_GAP_MAX: _maximum(-gap, some),
    }


def _constant_rollout(tokens: TokenLogProbs) -> Tensor:
    mask = tokens.mask
    if not mask.shape[1]:
        return mask.sum()
    first = mask.long().argmax(dim=1, keepdim=True)

    def constant(log_probs: Tensor) -> Tensor:
        return ((log_probs == log_probs.gather(1, first)) | ~mask).all(dim=1)

    return ((mask.sum(dim=1) >= CONSTANT_FROM) & constant(tokens.rollout) & ~constant(tokens.train)).sum()


def _lags(staleness: Tensor | None, parts: _Parts) -> Values:
    n, finite, total = parts.n.sum(dim=1), parts.finite.sum(dim=1), parts.k3.sum(dim=1)
    lag = torch.full_like(n, -1) if staleness is None else staleness
    return {
        s.FRESH_TOKENS: _total(n, lag == 0),
        s.FRESH_FINITE: _total(finite, lag == 0),
        s.FRESH_K3: _total(total, lag == 0),
        s.STALE_TOKENS: _total(n, lag > 0),
        s.STALE_K3: _total(total, lag > 0),
    }


def _unknown_lags(outcome: Outcome) -> Values:
    exists = outcome.tokens.mask.any(dim=1)
    return {s.LAG_UNKNOWN: (exists if outcome.staleness is None else exists & (outcome.staleness < 0)).sum()}


def _bins(outcome: Outcome, parts: _Parts) -> Values:
    mask = outcome.tokens.mask
    position = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
    probability = _reached(outcome.tokens.rollout_probability, PROBABILITY.edges)
    positions = _reached(torch.arange(mask.shape[1], device=mask.device), POSITION.edges)
    positions = positions.expand(mask.shape).gather(1, position)
    # One pass per value fills a table of probability by position. Lags need only the row's sum: a row has one lag.
    cells = len(PROBABILITY.labels) * len(POSITION.labels)
    index = (probability * len(POSITION.labels) + positions).flatten()
    lag = torch.full_like(mask[:, 0:1].sum(dim=1), -1) if outcome.staleness is None else outcome.staleness.long()
    lags = _reached(lag, STALENESS.edges)

    def by_bin(values: Tensor) -> Tensor:
        table = _per_bin(cells, index, values).reshape(len(PROBABILITY.labels), -1)
        rows = _per_bin(len(STALENESS.labels), lags, values.sum(dim=1))
        return torch.cat([table.sum(dim=1), table.sum(dim=0), rows])

    found = {
        s.BIN_TOKENS: by_bin(parts.n),
        s.BIN_FINITE: by_bin(parts.finite),
        s.BIN_KL: by_bin(-parts.log_ratio),
        s.BIN_ABS: by_bin(parts.log_ratio.abs()),
        s.BIN_K3: by_bin(parts.k3),
        s.BIN_PROB_DIFF: by_bin(parts.tv),
    }
    assert len(BIN_NAMES) == len(found[s.BIN_TOKENS])
    return found


def _per_bin(bins: int, index: Tensor, values: Tensor) -> Tensor:
    """(bins,): the sum of the values of each bin."""
    start = torch.zeros(bins, dtype=values.dtype, device=values.device)
    return start.scatter_add(0, index.flatten(), values.flatten())


def _reached(values: Tensor, edges: Sequence[float]) -> Tensor:
    """How many edges each value has reached. Edges are numbers: a tensor of them would need a copy to the device."""
    index = torch.zeros_like(values, dtype=torch.int8)
    for edge in edges:
        index += (values >= edge).view(torch.int8)
    return index.long()


def _criteria(config: RolloutCorrConfig, outcome: Outcome) -> Values:
    found: dict[Sum, list[Tensor]] = {}
    for criterion, verdict in zip(config.reject, outcome.verdicts, strict=True):
        exists, value = verdict.units.exists, verdict.value
        failing = outcome.tokens.mask & ~verdict.passes
        smallest = _maximum(-value, exists)
        if criterion.stat is Stat.K1 and criterion.agg is Agg.MAX:
            # With a maximum of k1 (a veto), the lower bound applies to each token, so the smallest token is reported.
            smallest = _maximum(-outcome.tokens.ratio, outcome.tokens.mask)
        values = {
            s.CRITERION_UNITS: exists.sum(),
            s.CRITERION_TOTAL: _total(value, exists),
            s.CRITERION_TOKENS: failing.sum(),
            s.CRITERION_SEQS: failing.any(dim=1).sum(),
            s.CRITERION_MAX: _maximum(value, exists),
            s.CRITERION_NEGATED_MIN: smallest,
        }
        for row, entry in values.items():
            found.setdefault(row, []).append(entry.double())
    return {row: torch.stack(entries) for row, entries in found.items()}


def _weights(weights: AppliedWeights) -> Values:
    exists, raw, applied = weights.units.exists, weights.raw, weights.applied
    off_one = torch.where(exists, applied - 1, 0.0)
    return {
        s.WEIGHT_UNITS: exists.sum(),
        s.WEIGHT_TOTAL: applied.sum(),
        s.WEIGHT_SQUARE: applied.square().sum(),
        s.WEIGHT_OFF_ONE: off_one.sum(),
        s.WEIGHT_OFF_ONE_SQUARE: off_one.square().sum(),
        s.WEIGHT_RAW: raw.sum(),
        s.WEIGHT_HIGH: weights.high.sum(),
        s.WEIGHT_LOW: weights.low.sum(),
        s.WEIGHT_MAX: _largest(applied, exists),
        s.WEIGHT_NEGATED_MIN: _maximum(-applied, exists),
        s.WEIGHT_RAW_MAX: _largest(raw, exists),
        s.WEIGHT_NEGATED_RAW_MIN: _maximum(-raw, exists),
    }
