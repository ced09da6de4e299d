"""The sums of a corrected batch: how each row of `sum_table.py` is computed.

Nothing here synchronises with the host. Outside the response, the log-probs in `TokenLogProbs` are 0, and so are the
statistics computed from them; so a sum over the response tokens is a plain sum over all positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from verl_rollout_corr.grammar import Agg, RolloutCorrConfig, Stat
from verl_rollout_corr.maths import sum_table as s
from verl_rollout_corr.maths.bins import POSITION, PROBABILITY, STALENESS
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

_TABLES = 8
"""Sums by bin are added up in so many tables, one token after the other in the next."""

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
    """What is summed over tokens, by bin and by row: numbers, 0 outside the response, and 0 where l is -inf but for tv.

    Of tokens they are (B, T), as the sums of rows (B,). `n` and `finite` are integers.
    """

    n: Tensor
    finite: Tensor
    log_ratio: Tensor
    abs_log_ratio: Tensor
    k3: Tensor
    tv: Tensor

    def of_rows(self) -> _Parts:
        """The sums of each row."""
        return _Parts(*(getattr(self, part.name).sum(dim=1) for part in fields(self)))


def collect(outcome: Outcome, config: RolloutCorrConfig) -> Sums:
    """The sums of one corrected batch, in the layout of `config`."""
    entries = layout(config)
    tokens = outcome.tokens
    log_ratio = tokens.log_ratio.nan_to_num(neginf=0.0)
    parts = _Parts(
        n=tokens.mask.long(),
        finite=tokens.finite.long(),
        log_ratio=log_ratio,
        abs_log_ratio=log_ratio.abs(),
        k3=statistic(Stat.K3, tokens).nan_to_num(posinf=0.0),
        tv=statistic(Stat.TV, tokens),
    )
    rows = parts.of_rows()
    lag = torch.full_like(rows.n, -1) if outcome.staleness is None else outcome.staleness.long()
    values: Values = _rejection(outcome)
    values |= _tokens(tokens, parts, rows) | _moments(tokens) | _sequences(tokens, rows) | _lags(lag, rows)
    if entries.bins:
        values |= _bins(tokens, lag, parts, rows)
    if entries.criteria:
        values |= _criteria(config, outcome)
        values[s.LAG_UNKNOWN] = ((rows.n > 0) & (lag < 0)).sum()
    if outcome.weights is not None:
        values |= _weights(outcome.weights)
    return Sums.of(entries, values)


def _maximum(values: Tensor, where: Tensor) -> Tensor:
    """The maximum of the values where `where` is True; -inf if it is True nowhere, or if the tensor is empty."""
    if not values.numel():
        return values.new_full((), -torch.inf)
    return torch.where(where, values, -torch.inf).max()


def _negated_minimum(values: Tensor, where: Tensor) -> Tensor:
    """The maximum of the negated values where `where` is True, likewise."""
    if not values.numel():
        return values.new_full((), -torch.inf)
    return -torch.where(where, values, torch.inf).min()


def _largest(values: Tensor, count: Tensor) -> Tensor:
    """The maximum of values that are at least 0, among them `count` of interest, the others 0; -inf without any."""
    if not values.numel():
        return values.new_full((), -torch.inf)
    return torch.where(count > 0, values.max(), -torch.inf)


def _total(values: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, values, 0.0).sum()


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """The sum of the products."""
    return torch.dot(a.flatten(), b.flatten())


def _rejection(outcome: Outcome) -> Values:
    tokens, kept = outcome.mask.sum(dim=1), outcome.keep.sum(dim=1)
    return {
        s.ALL_TOKENS: tokens.sum(),
        s.ALL_SEQS: (tokens > 0).sum(),
        s.REJECTED_TOKENS: (tokens - kept).sum(),
        s.TOUCHED_SEQS: (kept < tokens).sum(),
        s.DROPPED_SEQS: ((tokens > 0) & (kept == 0)).sum(),
        s.INVALID_SEQS: outcome.invalid.sum(),
    }


def _tokens(tokens: TokenLogProbs, parts: _Parts, rows: _Parts) -> Values:
    count = rows.n.sum()
    return {
        s.TOKENS: count,
        s.FINITE: rows.finite.sum(),
        s.KL: -rows.log_ratio.sum(),
        s.K3: rows.k3.sum(),
        s.ABS: statistic(Stat.ABS, tokens).sum(),
        s.RATIO_SQUARED: tokens.ratio.square().sum(),
        s.PROB_DIFF: rows.tv.sum(),
        s.PROB_DIFF_MAX: _largest(parts.tv, count),
        s.ZERO_ROLLOUT: _zeros(tokens.rollout, tokens.train),
        s.ZERO_TRAIN: _zeros(tokens.train, tokens.rollout),
        s.LOG_RATIOS: _per_bin(COUNT, _in_turn(bin_index(tokens.log_ratio), COUNT), parts.n),
    }


def _zeros(log_probs: Tensor, others: Tensor) -> Tensor:
    """How many are exactly 0.0 while the other side is not near 0; outside the response both are 0."""
    # Written as float64, both comparisons take half the time of bool.
    zero = torch.eq(log_probs, 0.0, out=torch.empty_like(log_probs))
    return _dot(zero, torch.lt(others, SUSPICIOUS_LOG_PROB, out=torch.empty_like(others)))


def _moments(tokens: TokenLogProbs) -> Values:
    # Outside the response both probabilities are exp(0) = 1; their distance from the centre, which is 1, is 0.
    q = tokens.rollout_probability
    centre = torch.ge(q, 0.5, out=torch.empty_like(q))
    p, q, rare = tokens.train_probability - centre, q - centre, 1 - centre
    return {
        s.FREQUENT: centre.sum() - (~tokens.mask).sum(),
        s.RARE_P: _dot(rare, p),
        s.RARE_Q: _dot(rare, q),
        s.FREQUENT_P: _dot(centre, p),
        s.FREQUENT_Q: _dot(centre, q),
        s.SQUARE_P: _dot(p, p),
        s.SQUARE_Q: _dot(q, q),
        s.PRODUCT_PQ: _dot(p, q),
    }


def _sequences(tokens: TokenLogProbs, rows: _Parts) -> Values:
    some, exists, count = rows.finite > 0, rows.n > 0, rows.finite.clamp(min=1)
    mean_train = tokens.train.nan_to_num(neginf=0.0).sum(dim=1) / count
    gap = -rows.log_ratio / count
    # Not mean_train + gap: beside a log pi_train of -60000 that loses seven digits of a log mu near 0.
    mean_rollout = torch.where(tokens.finite, tokens.rollout, 0.0).sum(dim=1) / count
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
        s.CONSTANT_ROLLOUT: _constant_rollout(tokens, rows.n),
        s.SEQ_GAP_MAX: _maximum(gap, some),
        s.SEQ_NEGATED_GAP_MAX: _negated_minimum(gap, some),
    }


def _constant_rollout(tokens: TokenLogProbs, count: Tensor) -> Tensor:
    mask = tokens.mask
    if not mask.shape[1]:
        return mask.sum()
    first = mask.long().argmax(dim=1, keepdim=True)

    def constant(log_probs: Tensor) -> Tensor:
        return ((log_probs == log_probs.gather(1, first)) & mask).sum(dim=1) == count

    return ((count >= CONSTANT_FROM) & constant(tokens.rollout) & ~constant(tokens.train)).sum()


def _lags(lag: Tensor, rows: _Parts) -> Values:
    return {
        s.FRESH_TOKENS: _total(rows.n, lag == 0),
        s.FRESH_FINITE: _total(rows.finite, lag == 0),
        s.FRESH_K3: _total(rows.k3, lag == 0),
        s.STALE_TOKENS: _total(rows.n, lag > 0),
        s.STALE_K3: _total(rows.k3, lag > 0),
    }


def _bins(tokens: TokenLogProbs, lag: Tensor, parts: _Parts, rows: _Parts) -> Values:
    # One pass per value fills a table of probability by position. Lags need only the row's sum: a row has one lag.
    number = parts.n.cumsum(dim=1)  # 1 for the first token of the response
    reached = _reached(torch.arange(-1, number.shape[1], device=lag.device), POSITION.edges)
    index = reached.expand(len(number), -1).gather(1, number)
    index.add_(_reached(tokens.rollout_probability, PROBABILITY.edges), alpha=len(POSITION.labels))
    cells, lags = len(PROBABILITY.labels) * len(POSITION.labels), len(STALENESS.labels)
    places, places_of_rows = _in_turn(index, cells), _in_turn(_reached(lag, STALENESS.edges), lags)
    found: Values = {}
    for row, by_token, by_row in (
        (s.BIN_TOKENS, parts.n, rows.n),
        (s.BIN_FINITE, parts.finite, rows.finite),
        (s.BIN_KL, parts.log_ratio, rows.log_ratio),
        (s.BIN_ABS, parts.abs_log_ratio, rows.abs_log_ratio),
        (s.BIN_K3, parts.k3, rows.k3),
        (s.BIN_PROB_DIFF, parts.tv, rows.tv),
    ):
        table = _per_bin(cells, places, by_token).reshape(len(PROBABILITY.labels), -1)
        found[row] = torch.cat([table.sum(dim=1), table.sum(dim=0), _per_bin(lags, places_of_rows, by_row)])
    found[s.BIN_KL] = -found[s.BIN_KL]
    return found


def _in_turn(index: Tensor, bins: int) -> Tensor:
    """The places of values in `_per_bin`, from the bin of each. Neighbours, which often are in one bin, get different
    places, because an addition to the same place would wait for the one before: three times as long.
    """
    return index + torch.arange(index.shape[-1], device=index.device).remainder_(_TABLES).mul_(bins)


def _per_bin(bins: int, places: Tensor, values: Tensor) -> Tensor:
    """(bins,): the sum of the values of each bin."""
    tables = torch.zeros(_TABLES * bins, dtype=values.dtype, device=values.device)
    return tables.scatter_add_(0, places.flatten(), values.flatten()).view(_TABLES, bins).sum(dim=0)


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
        failing = (outcome.tokens.mask & ~verdict.passes).sum(dim=1)
        smallest = _negated_minimum(value, exists)
        if criterion.stat is Stat.K1 and criterion.agg is Agg.MAX:
            # With a maximum of k1 (a veto), the lower bound applies to each token, so the smallest token is reported.
            smallest = _negated_minimum(outcome.tokens.ratio, outcome.tokens.mask)
        values = {
            s.CRITERION_UNITS: exists.sum(),
            s.CRITERION_TOTAL: _total(value, exists),
            s.CRITERION_TOKENS: failing.sum(),
            s.CRITERION_SEQS: (failing > 0).sum(),
            s.CRITERION_MAX: _maximum(value, exists),
            s.CRITERION_NEGATED_MIN: smallest,
        }
        for row, entry in values.items():
            found.setdefault(row, []).append(entry.double())
    return {row: torch.stack(entries) for row, entries in found.items()}


def _weights(weights: AppliedWeights) -> Values:
    exists, raw, applied = weights.units.exists, weights.raw, weights.applied
    count, off_one = exists.sum(), torch.where(exists, applied - 1, 0.0)
    return {
        s.WEIGHT_UNITS: count,
        s.WEIGHT_TOTAL: applied.sum(),
        s.WEIGHT_SQUARE: _dot(applied, applied),
        s.WEIGHT_OFF_ONE: off_one.sum(),
        s.WEIGHT_OFF_ONE_SQUARE: _dot(off_one, off_one),
        s.WEIGHT_RAW: raw.sum(),
        s.WEIGHT_HIGH: weights.high.sum(),
        s.WEIGHT_LOW: weights.low.sum(),
        s.WEIGHT_MAX: _largest(applied, count),
        s.WEIGHT_NEGATED_MIN: _negated_minimum(applied, exists),
        s.WEIGHT_RAW_MAX: _largest(raw, count),
        s.WEIGHT_NEGATED_RAW_MIN: _negated_minimum(raw, exists),
    }
