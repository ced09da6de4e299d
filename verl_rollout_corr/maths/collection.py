"""The sums of a corrected batch: how each row of `sum_table.py` is computed.

Nothing here synchronises with the host. Outside the response, the log-probs in `TokenLogProbs` are 0, and so are the
statistics computed from them; so a sum over the response tokens is a plain sum over all positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from verl_rollout_corr.grammar import Agg, RolloutCorrConfig, Stat
from verl_rollout_corr.maths import sum_table as s
from verl_rollout_corr.maths.bins import POSITION, PROBABILITY, STALENESS
from verl_rollout_corr.maths.criteria import Verdict
from verl_rollout_corr.maths.histogram import counts_by_bin
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

_IN_TURN, _GROUPS = 8, 16
"""Sums by bin are added up in so many tables, one token after the other in the next, and so for so many groups of rows
if these can be equally large.
"""

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

    Of tokens they are (B, T), as the sums of rows (B,). `n` and `finite` are integers, and may be the same tensor.
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
    parts = _Parts(
        n=tokens.n,
        finite=tokens.n if tokens.all_finite else tokens.finite.long(),
        log_ratio=tokens.finite_log_ratio,
        abs_log_ratio=tokens.abs_log_ratio,
        k3=tokens.finite_k3,
        tv=statistic(Stat.TV, tokens),
    )
    rows = parts.of_rows()
    lag = torch.full_like(rows.n, -1) if outcome.staleness is None else outcome.staleness.long()
    values: Values = _rejection(outcome)
    by_lag = _by_lag(lag, rows)
    values |= _tokens(tokens, parts, rows) | _moments(tokens, rows) | _sequences(tokens, rows) | _lags(by_lag)
    if entries.bins:
        values |= _bins(tokens, parts, by_lag)
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
    return torch.where(where, values, -torch.inf).amax()


def _negated_minimum(values: Tensor, where: Tensor) -> Tensor:
    """The maximum of the negated values where `where` is True, likewise."""
    if not values.numel():
        return values.new_full((), -torch.inf)
    return -torch.where(where, values, torch.inf).amin()


def _largest(values: Tensor, count: Tensor) -> Tensor:
    """The maximum of values that are at least 0, among them `count` of interest, the others 0; -inf without any."""
    if not values.numel():
        return values.new_full((), -torch.inf)
    return torch.where(count > 0, values.amax(), -torch.inf)


def _total(values: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, values, 0.0).sum()


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """The sum of the products."""
    return torch.dot(a.flatten(), b.flatten())


def _rejection(outcome: Outcome) -> Values:
    all_valid = outcome.mask is outcome.tokens.mask
    tokens = outcome.tokens.count if all_valid else outcome.mask.sum(dim=1)
    kept = outcome.keep.sum(dim=1)
    return {
        s.ALL_TOKENS: tokens.sum(),
        s.ALL_SEQS: (tokens > 0).sum(),
        s.REJECTED_TOKENS: (tokens - kept).sum(),
        s.TOUCHED_SEQS: (kept < tokens).sum(),
        s.DROPPED_SEQS: ((tokens > 0) & (kept == 0)).sum(),
        s.INVALID_SEQS: outcome.invalid.sum(),
    }


def _tokens(tokens: TokenLogProbs, parts: _Parts, rows: _Parts) -> Values:
    count, finite = rows.n.sum(), rows.finite.sum()
    return {
        s.TOKENS: count,
        s.FINITE: finite,
        s.KL: -rows.log_ratio.sum(),
        s.K3: rows.k3.sum(),
        s.ABS: tokens.finite_growth.abs().sum() + (count - finite),  # it is 1 where r is 0
        s.RATIO_SQUARED: _dot(tokens.ratio, tokens.ratio),
        s.PROB_DIFF: rows.tv.sum(),
        s.PROB_DIFF_MAX: _largest(parts.tv, count),
        s.ZERO_ROLLOUT: _zeros(tokens.rollout, tokens.train),
        s.ZERO_TRAIN: _zeros(tokens.train, tokens.rollout),
        s.LOG_RATIOS: counts_by_bin(tokens.log_ratio, parts.n),
    }


def _zeros(log_probs: Tensor, others: Tensor) -> Tensor:
    """How many are exactly 0.0 while the other side is not near 0; outside the response both are 0."""
    # Written as float64, both comparisons take half the time of bool.
    zero = torch.eq(log_probs, 0.0, out=torch.empty_like(log_probs))
    return _dot(zero, torch.lt(others, SUSPICIOUS_LOG_PROB, out=torch.empty_like(others)))


def _moments(tokens: TokenLogProbs, rows: _Parts) -> Values:
    # Outside the response both probabilities are exp(0) = 1; their distance from the centre, which is 1, is 0.
    p, q = tokens.train_probability.flatten(), tokens.rollout_probability.flatten()
    centre = torch.ge(q, 0.5, out=torch.empty_like(q))
    outside = len(q) - rows.n.sum()
    p, q = p - centre, q - centre
    frequent, frequent_p, frequent_q = centre.sum() - outside, centre.dot(p), centre.dot(q)
    rare = centre.sub_(1).neg_()
    return {
        s.FREQUENT: frequent,
        s.RARE_P: rare.dot(p),
        s.RARE_Q: rare.dot(q),
        s.FREQUENT_P: frequent_p,
        s.FREQUENT_Q: frequent_q,
        s.SQUARE_P: p.dot(p),
        s.SQUARE_Q: q.dot(q),
        s.PRODUCT_PQ: p.dot(q),
    }


def _sequences(tokens: TokenLogProbs, rows: _Parts) -> Values:
    some, exists, count = rows.finite > 0, rows.n > 0, rows.finite.clamp(min=1)
    mean_train = tokens.unless_impossible(tokens.train).sum(dim=1) / count
    gap = -rows.log_ratio / count
    # Not mean_train + gap: beside a log pi_train of -60000 that loses seven digits of a log mu near 0.
    mean_rollout = tokens.unless_impossible(tokens.rollout).sum(dim=1) / count
    product = ratio(torch.where(rows.finite < rows.n, -torch.inf, rows.log_ratio))
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
        s.SEQ_NEGATED_GAP_MAX: _negated_minimum(gap, some),
    }


def _constant_rollout(tokens: TokenLogProbs) -> Tensor:
    rollout = _constant(tokens, tokens.rollout, tokens.rollout_range)
    train = _constant(tokens, tokens.train, tokens.train_range)
    return ((tokens.count >= CONSTANT_FROM) & rollout & ~train).sum()


def _constant(tokens: TokenLogProbs, log_probs: Tensor, in_row: tuple[Tensor, Tensor]) -> Tensor:
    """(B,) bool: rows in which the log-probs of all response tokens are equal."""
    smallest, largest = in_row
    value = torch.where(largest > 0, largest, smallest)  # of such a row, zeros outside the response or not
    equal = torch.eq(log_probs, value[:, None], out=torch.empty_like(log_probs)).sum(dim=1)
    return equal == torch.where(value == 0, log_probs.shape[1], tokens.count)


def _by_lag(lag: Tensor, rows: _Parts) -> _Parts:
    """The sums of the rows of each bin of `STALENESS`. A row has one lag."""
    places, count = _reached(lag, STALENESS.edges)[None], len(STALENESS.labels)
    return _Parts(*(_per_place(count, places, getattr(rows, part.name)[None]) for part in fields(rows)))


def _lags(by_lag: _Parts) -> Values:
    fresh = STALENESS.labels.index("lag_0")
    return {
        s.FRESH_TOKENS: by_lag.n[fresh],
        s.FRESH_FINITE: by_lag.finite[fresh],
        s.FRESH_K3: by_lag.k3[fresh],
        s.STALE_TOKENS: by_lag.n[fresh + 1 :].sum(),
        s.STALE_K3: by_lag.k3[fresh + 1 :].sum(),
    }


def _bins(tokens: TokenLogProbs, parts: _Parts, by_lag: _Parts) -> Values:
    # One pass per value fills a table of probability by position.
    positions, probabilities = len(POSITION.labels), len(PROBABILITY.labels)
    cells = positions * probabilities
    number = parts.n.cumsum(dim=1)  # 1 for the first token of the response
    numbers = torch.arange(number.shape[1] + 1, device=number.device)
    # Neighbours, which often are in one bin, get different tables in turn, because an addition to the same place would
    # wait for the one before: three times as long.
    places = _reached(numbers - 1, POSITION.edges) + numbers.remainder(_IN_TURN) * cells
    places = places.double().expand(len(number), -1).gather(1, number)
    places = _add_reached(places, tokens.rollout_probability, PROBABILITY.edges, each=positions).long()
    # And so do groups of rows, which are on different threads.
    groups = math.gcd(len(number), _GROUPS)
    places = places.reshape(groups, -1)
    found: Values = {}
    for row, by_token, of_lag in (
        (s.BIN_TOKENS, parts.n, by_lag.n),
        (s.BIN_FINITE, parts.finite, by_lag.finite),
        (s.BIN_KL, parts.log_ratio, by_lag.log_ratio),
        (s.BIN_ABS, parts.abs_log_ratio, by_lag.abs_log_ratio),
        (s.BIN_K3, parts.k3, by_lag.k3),
        (s.BIN_PROB_DIFF, parts.tv, by_lag.tv),
    ):
        if row is s.BIN_FINITE and by_token is parts.n:
            found[row] = found[s.BIN_TOKENS]
            continue
        sums = _per_place(_IN_TURN * cells, places, by_token.reshape(groups, -1))
        table = sums.view(_IN_TURN, probabilities, positions).sum(dim=0)
        found[row] = torch.cat([table.sum(dim=1), table.sum(dim=0), of_lag])
    found[s.BIN_KL] = -found[s.BIN_KL]
    return found


def _per_place(count: int, places: Tensor, values: Tensor) -> Tensor:
    """(count,): the sum of the values at each place; both are (G, N), and each of G has a table of its own."""
    tables = torch.zeros(len(values), count, dtype=values.dtype, device=values.device)
    return tables.scatter_add_(1, places, values).sum(dim=0)


def _reached(values: Tensor, edges: Sequence[float]) -> Tensor:
    """How many edges each value has reached."""
    return _add_reached(torch.zeros_like(values), values, edges).long()


def _add_reached(index: Tensor, values: Tensor, edges: Sequence[float], *, each: int = 1) -> Tensor:
    """Adds to the index for each edge that the value has reached; both have one type, which is faster than bool.

    Edges are numbers, because a tensor of them would need a copy to the device.
    """
    reached = torch.empty_like(values)
    for edge in edges:
        index.add_(torch.ge(values, edge, out=reached), alpha=each)
    return index


def _criteria(config: RolloutCorrConfig, outcome: Outcome) -> Values:
    found: dict[Sum, list[Tensor]] = {}
    for criterion, verdict in zip(config.reject, outcome.verdicts, strict=True):
        units, value = verdict.units, verdict.value
        exists = units.exists
        failing = units.tokens_in(~verdict.inside)
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
