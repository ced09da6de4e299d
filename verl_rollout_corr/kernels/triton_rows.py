"""The device side of the twin on a GPU: one program per row, which walks over the row's tokens in blocks.

It is written for Triton. It reads a table of the criteria and of the weights, so that it is compiled once, and not once
per preset. `maths` says what each number means. Sums are float64, as there.
"""

# Triton's type hints describe a kernel's arguments as they are inside it, not as they are passed.
# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from verl_rollout_corr.grammar import Agg, Outside, Scope, Stat, When
from verl_rollout_corr.maths import sum_table as s
from verl_rollout_corr.maths.bins import BIN_NAMES, POSITION, PROBABILITY, STALENESS
from verl_rollout_corr.maths.collection import CONSTANT_FROM, SUSPICIOUS_LOG_PROB
from verl_rollout_corr.maths.histogram import _FIRST, _SHIFT, CENTRE, SIDE
from verl_rollout_corr.maths.inputs import LEAST_ROLLOUT_LOG_PROB, LOG_PROB_SLACK
from verl_rollout_corr.maths.log_ratio import EXPONENT_LIMIT
from verl_rollout_corr.maths.statistics import _COMPLEMENT_FLOOR

STATS = {Stat.K1: 0, Stat.K2: 1, Stat.K3: 2, Stat.ABS: 3, Stat.TV: 4, Stat.BKL: 5, Stat.BKL_MU: 6, Stat.LAG: 7}
"""Codes of the statistics in the table of criteria."""
AGGS = {None: 0, Agg.SUM: 1, Agg.MEAN: 2, Agg.MAX: 3}
"""Codes of the aggregations."""
SCOPES = {Scope.TOKEN: 0, Scope.SEQ: 1}
"""Codes of the scopes that the kernel knows."""
WHENS = {None: 0, When.NEGATIVE_ADVANTAGE: 1, When.POSITIVE_ADVANTAGE: 2, When.OUTWARD: 3}
"""Codes of `when`."""
OUTSIDES = {Outside.TRUNCATE: 0, Outside.MASK: 1}
"""Codes of what happens to a weight outside its bounds."""
CRITERION_WORDS = 8
"""Stat, scope, aggregation, when, lower and upper in the statistic's scale, and both rounded to what is compared."""
WEIGHT_WORDS = 8
"""Level, aggregation, outside, lower and upper, both rounded to what is compared, and one that is not used."""
NO_WEIGHTS, TOKEN_WEIGHTS, PREFIX_WEIGHTS, ROW_WEIGHTS = range(4)

ROW_TOTALS = (
    s.ALL_TOKENS,
    s.ALL_SEQS,
    s.REJECTED_TOKENS,
    s.TOUCHED_SEQS,
    s.DROPPED_SEQS,
    s.INVALID_SEQS,
    s.TOKENS,
    s.FINITE,
    s.KL,
    s.K3,
    s.ABS,
    s.RATIO_SQUARED,
    s.PROB_DIFF,
    s.ZERO_ROLLOUT,
    s.ZERO_TRAIN,
    s.FREQUENT,
    s.RARE_P,
    s.RARE_Q,
    s.FREQUENT_P,
    s.FREQUENT_Q,
    s.SQUARE_P,
    s.SQUARE_Q,
    s.PRODUCT_PQ,
    s.SEQS,
    s.FINITE_SEQS,
    s.SEQ_TRAIN,
    s.SEQ_ROLLOUT,
    s.SEQ_TRAIN_PPL,
    s.SEQ_ROLLOUT_PPL,
    s.SEQ_GAP,
    s.SEQ_ABS_GAP,
    s.SEQ_PPL_RATIO,
    s.SEQ_RATIO_SQUARED,
    s.CONSTANT_ROLLOUT,
    s.FRESH_TOKENS,
    s.FRESH_FINITE,
    s.FRESH_K3,
    s.STALE_TOKENS,
    s.STALE_K3,
    s.LAG_UNKNOWN,
    s.WEIGHT_UNITS,
    s.WEIGHT_TOTAL,
    s.WEIGHT_SQUARE,
    s.WEIGHT_OFF_ONE,
    s.WEIGHT_OFF_ONE_SQUARE,
    s.WEIGHT_RAW,
    s.WEIGHT_HIGH,
    s.WEIGHT_LOW,
)
"""The totals of a row, in the order in which the program writes them; bins and criteria follow."""
ROW_MAXIMA = (
    s.PROB_DIFF_MAX,
    s.SEQ_GAP_MAX,
    s.SEQ_NEGATED_GAP_MAX,
    s.WEIGHT_MAX,
    s.WEIGHT_NEGATED_MIN,
    s.WEIGHT_RAW_MAX,
    s.WEIGHT_NEGATED_RAW_MIN,
)
"""The maxima of a row, likewise."""
BIN_TOTALS = (s.BIN_TOKENS, s.BIN_FINITE, s.BIN_KL, s.BIN_ABS, s.BIN_K3, s.BIN_PROB_DIFF)
"""The totals of each bin of each partition, in the order of the partitions."""
CRITERION_TOTALS = (s.CRITERION_UNITS, s.CRITERION_TOTAL, s.CRITERION_TOKENS, s.CRITERION_SEQS)
"""The totals of each criterion, in order."""
CRITERION_MAXIMA = (s.CRITERION_MAX, s.CRITERION_NEGATED_MIN)
"""The maxima of each criterion, in order."""

_TOTALS = tl.constexpr(len(ROW_TOTALS))
_P_BINS = tl.constexpr(len(PROBABILITY.labels))
_X_BINS = tl.constexpr(len(POSITION.labels))
_P1, _P2, _P3, _P4 = (tl.constexpr(edge) for edge in PROBABILITY.edges)
_X1, _X2, _X3, _X4, _X5, _X6 = (tl.constexpr(int(edge)) for edge in POSITION.edges)
_L1, _L2, _L3, _L4, _L5, _L6 = (tl.constexpr(int(edge)) for edge in STALENESS.edges)
_LIMIT = tl.constexpr(EXPONENT_LIMIT)
_LEAST = tl.constexpr(LEAST_ROLLOUT_LOG_PROB)
_SLACK = tl.constexpr(LOG_PROB_SLACK)
_SUSPICIOUS = tl.constexpr(SUSPICIOUS_LOG_PROB)
_CONSTANT_FROM = tl.constexpr(CONSTANT_FROM)
_FLOOR = tl.constexpr(_COMPLEMENT_FLOOR)
_H_SHIFT, _H_FIRST = tl.constexpr(_SHIFT), tl.constexpr(_FIRST)
_H_CENTRE, _H_SIDE = tl.constexpr(CENTRE), tl.constexpr(SIDE)
_NEAR = tl.constexpr(0.35)
_LOWEST = tl.constexpr(-1e300)
_WORDS = tl.constexpr(CRITERION_WORDS)


@triton.jit
def _series(x):
    """e^x - 1 - x for |x| <= 0.35: Taylor's series, whose first missing term is below 5e-18 of it."""
    value = x * 0.0 + 1.0
    for i in tl.static_range(11):
        value = 1.0 + x * value * (1.0 / (13 - i))
    return 0.5 * x * x * value


@triton.jit
def _growth(x):
    """e^x - 1 and e^x - 1 - x, neither losing a small x; for x in [-745, 700]."""
    near = tl.abs(x) <= _NEAR
    small = _series(tl.where(near, x, 0.0))
    off = tl.exp(x) - 1.0
    return tl.where(near, x + small, off), tl.where(near, small, off - x)


@triton.jit
def _ratio(x):
    """exp(clip(x, -20, 20)); 0 for -inf."""
    return tl.where(x < _LOWEST, 0.0, tl.exp(tl.minimum(tl.maximum(x, -_LIMIT), _LIMIT)))


@triton.jit
def _k3(log_ratio):
    _, near = _growth(tl.minimum(tl.maximum(log_ratio, -_LIMIT), _LIMIT))
    clipped = tl.minimum(tl.maximum(log_ratio, -_LIMIT), _LIMIT)
    # Beyond the limit the linear term goes on, and the exponential does not.
    value = near + (clipped - tl.minimum(log_ratio, 1e8))
    return tl.where(log_ratio < _LOWEST, float("inf"), tl.maximum(value, 0.0))


@triton.jit
def _absolute(log_ratio):
    off, _ = _growth(tl.minimum(tl.maximum(log_ratio, -_LIMIT), _LIMIT))
    return tl.where(log_ratio < _LOWEST, 1.0, tl.abs(off))


@triton.jit
def _log1p(x):
    """log(1 + x) for x > -1: from 2 artanh(x / (2 + x)) for a small x."""
    near = tl.abs(x) <= _NEAR
    small = tl.where(near, x, 0.0)
    half = small / (2.0 + small)
    square = half * half
    value = square * 0.0 + 1.0 / 25
    for i in tl.static_range(12):
        value = 1.0 / (23 - 2 * i) + square * value
    return tl.where(near, 2.0 * half * value, tl.log(tl.maximum(1.0 + tl.where(near, 0.0, x), 1e-300)))


@triton.jit
def _weighted_phi(weight, log):
    """Phi(x) = x e^x - e^x + 1 times the weight; phi(-inf) = 1."""
    bounded = tl.maximum(log, -700.0)
    off, rest = _growth(bounded)
    near = tl.abs(bounded) <= _NEAR
    phi = tl.where(near, bounded * off - rest, bounded * (1.0 + off) - off)
    phi = tl.where(log < _LOWEST, 1.0, phi)
    return tl.where(weight == 0.0, 0.0, weight * phi)


@triton.jit
def _bernoulli_kl(log_p, log_q):
    """`maths.statistics._bernoulli_kl`."""
    impossible = (log_q < _LOWEST) & (log_p > _LOWEST)
    log_p, log_q = tl.maximum(log_p, -745.0), tl.maximum(log_q, -745.0)
    log_ratio = log_p - log_q
    off_p, _ = _growth(log_p)
    off_q, _ = _growth(log_q)
    p, q = tl.exp(log_p), tl.exp(log_q)
    not_p, not_q = tl.maximum(-off_p, _FLOOR), tl.maximum(-off_q, _FLOOR)
    far = log_ratio > 1.0
    near = tl.minimum(log_ratio, 1.0)
    off, _ = _growth(tl.maximum(near, -745.0))
    moved = tl.where(far, q - p, -q * off)
    taken = tl.where(far, p * log_ratio - p + q, _weighted_phi(q, near))
    floored = (-off_p < not_p) | (-off_q < not_q)
    moved_complement = tl.where(floored, not_p - not_q, moved)
    share = tl.maximum(moved_complement / not_q, -1.0)
    log = tl.where(share <= -1.0, float("-inf"), _log1p(tl.maximum(share, -1.0 + 1e-16)))
    divergence = taken + _weighted_phi(not_q, log) + tl.where(floored, moved_complement - moved, 0.0)
    return tl.where(impossible, float("inf"), divergence)


@triton.jit
def _statistic(code, train, rollout, log_ratio):
    """The statistic of each token; a new one is a branch here and a code in STATS."""
    value = log_ratio
    if code == 1:
        value = 0.5 * log_ratio * log_ratio
    if code == 2:
        value = _k3(log_ratio)
    if code == 3:
        value = _absolute(log_ratio)
    if code == 4:
        value = tl.abs(tl.exp(train) - tl.exp(rollout))
    if code >= 5:
        p, q = tl.minimum(train, 0.0), tl.minimum(rollout, 0.0)
        backward = _bernoulli_kl(q, p)
        value = backward
        if code == 5:
            value = tl.maximum(_bernoulli_kl(p, q), backward)
    return value


@triton.jit
def _below(value, bound, rounded, SINGLE: tl.constexpr):
    """Whether the value is below the bound, -inf where there is none; in float32 where the log-probs were no wider."""
    narrow = value.to(tl.float32).to(tl.float64)
    single = tl.where(tl.abs(narrow) < float("inf"), narrow < rounded, value < bound)
    return single if SINGLE else value < bound


@triton.jit
def _above(value, bound, rounded, SINGLE: tl.constexpr):
    """The same above the bound, +inf where there is none."""
    narrow = value.to(tl.float32).to(tl.float64)
    single = tl.where(tl.abs(narrow) < float("inf"), narrow > rounded, value > bound)
    return single if SINGLE else value > bound


@triton.jit
def _may_reject(when, advantage, log_ratio):
    """Whether `when` allows the criterion to reject a unit, by the unit's mean advantage and its sum of l."""
    outward = ((advantage > 0.0) & (log_ratio > 0.0)) | ((advantage < 0.0) & (log_ratio < 0.0))
    negative, positive = (when == 1) & (advantage < 0.0), (when == 2) & (advantage > 0.0)
    return (when == 0) | negative | positive | ((when == 3) & outward)


@triton.jit
def _read(train_ptr, rollout_ptr, mask_ptr, start, at, length, invalid):
    """The log-probs and the mask of a block of a row: 0 where the mask is 0, and everywhere if `invalid` is not 0."""
    # Triton's interpreter takes a truth of the whole row for a number beside truths of tokens: so it is a number.
    inside = at < length
    mask = (tl.load(mask_ptr + start + at, mask=inside, other=0) != 0) & inside & (at * 0.0 + invalid == 0.0)
    train = tl.load(train_ptr + start + at, mask=mask, other=0.0).to(tl.float64)
    rollout = tl.load(rollout_ptr + start + at, mask=mask, other=0.0).to(tl.float64)
    return tl.where(mask, train, 0.0), tl.where(mask, rollout, 0.0), mask


@triton.jit
def _advantages(advantages_ptr, row, start, at, mask, PER_ROW: tl.constexpr):
    where = row + at * 0 if PER_ROW else start + at
    value = tl.load(advantages_ptr + where, mask=mask, other=0.0).to(tl.float64)
    return tl.where(mask, value, 0.0)


@triton.jit
def _sum(values, where):
    return tl.sum(tl.where(where, values, 0.0))


@triton.jit
def _count(where):
    return tl.sum(where.to(tl.int32)).to(tl.float64)


@triton.jit
def _most(values, where):
    return tl.max(tl.where(where, values, float("-inf")))


@triton.jit
def _at(acc, slots, index, value):
    """The accumulators with a value added to one of them."""
    return acc + tl.where(slots == index, value, 0.0)


@triton.jit
def _judge(criterion_ptr, train, rollout, log_ratio, advantage, SINGLE: tl.constexpr):
    """A token criterion on a block: which tokens fail, and the value that its metrics show."""
    code, when = tl.load(criterion_ptr).to(tl.int32), tl.load(criterion_ptr + 3).to(tl.int32)
    value = _statistic(code, train, rollout, log_ratio)
    low = _below(value, tl.load(criterion_ptr + 4), tl.load(criterion_ptr + 6), SINGLE)
    high = _above(value, tl.load(criterion_ptr + 5), tl.load(criterion_ptr + 7), SINGLE)
    fails = (low | high) & _may_reject(when, advantage, log_ratio)
    return fails, tl.where(code == 0, _ratio(value), value)


@triton.jit
def _survey(train_ptr, rollout_ptr, mask_ptr, start, length, BLOCK: tl.constexpr):
    """The response tokens of a row, the invalid ones among them, and the position of the first."""
    tokens, wrong = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    first = tl.full((), 0, tl.int32) + length
    for begin in range(0, length, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        train, rollout, mask = _read(train_ptr, rollout_ptr, mask_ptr, start, at, length, 0.0)
        fine = (train <= _SLACK) & (rollout <= _SLACK) & (rollout >= _LEAST)
        tokens += _count(mask)
        wrong += _count(mask & (fine == 0))
        first = tl.minimum(first, tl.min(tl.where(mask, at, length)))
    return tokens, wrong, first


@triton.jit
def rows_kernel(
    train_ptr,
    rollout_ptr,
    mask_ptr,
    advantages_ptr,
    lag_ptr,
    criteria_ptr,
    weights_ptr,
    places_ptr,
    keep_ptr,
    weight_ptr,
    totals_ptr,
    maxima_ptr,
    counts_ptr,
    length,
    criteria,
    total_words,
    maximum_words,
    BLOCK: tl.constexpr,
    SINGLE: tl.constexpr,
    ADVANTAGES: tl.constexpr,
    LAGS: tl.constexpr,
    BINS: tl.constexpr,
    WEIGHTS: tl.constexpr,
):
    """One row: what is kept, the weights, and the row's sums. `places` says where each entry stands, -1 for nowhere."""
    row = tl.program_id(0).to(tl.int64)
    start = row * length
    slots, most_slots = tl.arange(0, 256), tl.arange(0, 8)
    acc = tl.zeros((256,), dtype=tl.float64)
    most = tl.full((8,), float("-inf"), tl.float64)
    lag = tl.load(lag_ptr + row).to(tl.int64) if LAGS else tl.full((), -1, tl.int64)

    all_tokens, wrong, first = _survey(train_ptr, rollout_ptr, mask_ptr, start, length, BLOCK)
    invalid = (wrong > 0.0).to(tl.float64)
    first_at = tl.minimum(first, length - 1)
    first_train = tl.load(train_ptr + start + first_at).to(tl.float64)
    first_rollout = tl.load(rollout_ptr + start + first_at).to(tl.float64)

    # The mismatch of the tokens.
    histogram = tl.zeros((512,), dtype=tl.int32)
    n, finite_n = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    sum_l, sum_all_l, sum_abs = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    sum_k3, sum_tv = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    sum_train, sum_rollout = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    other_train, other_rollout = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    most_tv = tl.full((), float("-inf"), tl.float64)
    for begin in range(0, length, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        train, rollout, mask = _read(train_ptr, rollout_ptr, mask_ptr, start, at, length, invalid)
        log_ratio = train - rollout
        finite = mask & (log_ratio > _LOWEST)
        p, q = tl.exp(train), tl.exp(rollout)
        k3, tv, ratio = _k3(log_ratio), tl.abs(p - q), _ratio(log_ratio)
        n += _count(mask)
        finite_n += _count(finite)
        sum_l += _sum(log_ratio, finite)
        sum_all_l += _sum(log_ratio, mask)
        sum_abs += _sum(tl.abs(log_ratio), finite)
        sum_k3 += _sum(k3, finite)
        sum_tv += _sum(tv, mask)
        sum_train += _sum(train, finite)
        sum_rollout += _sum(rollout, finite)
        other_train += _count(mask & (train != first_train))
        other_rollout += _count(mask & (rollout != first_rollout))
        most_tv = tl.maximum(most_tv, _most(tv, mask))
        acc = _at(acc, slots, 10, _sum(_absolute(log_ratio), mask))
        acc = _at(acc, slots, 11, _sum(ratio * ratio, mask))
        acc = _at(acc, slots, 13, _count(mask & (rollout == 0.0) & (train < _SUSPICIOUS)))
        acc = _at(acc, slots, 14, _count(mask & (train == 0.0) & (rollout < _SUSPICIOUS)))
        frequent = mask & (q >= 0.5)
        rare = mask & (q < 0.5)
        centre = tl.where(frequent, 1.0, 0.0)
        off_p, off_q = p - centre, q - centre
        acc = _at(acc, slots, 15, _count(frequent))
        acc = _at(acc, slots, 16, _sum(off_p, rare))
        acc = _at(acc, slots, 17, _sum(off_q, rare))
        acc = _at(acc, slots, 18, _sum(off_p, frequent))
        acc = _at(acc, slots, 19, _sum(off_q, frequent))
        acc = _at(acc, slots, 20, _sum(off_p * off_p, mask))
        acc = _at(acc, slots, 21, _sum(off_q * off_q, mask))
        acc = _at(acc, slots, 22, _sum(off_p * off_q, mask))
        bits = tl.abs(log_ratio).to(tl.int64, bitcast=True) >> _H_SHIFT
        reached = tl.minimum(tl.maximum(bits - (_H_FIRST - 1), 0), _H_SIDE + 1)
        index = tl.where(log_ratio < 0.0, _H_CENTRE - reached, _H_CENTRE + reached)
        index = tl.where(log_ratio < _LOWEST, 0, index)
        histogram += tl.histogram(index.to(tl.int32), 512, mask=mask)
    counted = tl.arange(0, 512)
    tl.atomic_add(counts_ptr + counted, histogram.to(tl.int64), mask=histogram > 0)

    exists, some = (n > 0.0).to(tl.float64), (finite_n > 0.0).to(tl.float64)
    mean_train, mean_rollout = sum_train / tl.maximum(finite_n, 1.0), sum_rollout / tl.maximum(finite_n, 1.0)
    gap, product = mean_rollout - mean_train, _ratio(sum_all_l)
    constant = (n >= _CONSTANT_FROM) & (other_rollout == 0.0) & (other_train > 0.0)
    fresh, stale = (lag == 0).to(tl.float64), (lag > 0).to(tl.float64)
    acc = _at(acc, slots, 0, all_tokens)
    acc = _at(acc, slots, 1, (all_tokens > 0.0).to(tl.float64))
    acc = _at(acc, slots, 5, invalid)
    acc = _at(acc, slots, 6, n)
    acc = _at(acc, slots, 7, finite_n)
    acc = _at(acc, slots, 8, -sum_l)
    acc = _at(acc, slots, 9, sum_k3)
    acc = _at(acc, slots, 12, sum_tv)
    acc = _at(acc, slots, 23, exists)
    acc = _at(acc, slots, 24, some)
    acc = _at(acc, slots, 25, -mean_train)
    acc = _at(acc, slots, 26, -mean_rollout)
    acc = _at(acc, slots, 27, some * _ratio(-mean_train))
    acc = _at(acc, slots, 28, some * _ratio(-mean_rollout))
    acc = _at(acc, slots, 29, gap)
    acc = _at(acc, slots, 30, tl.abs(gap))
    acc = _at(acc, slots, 31, some * _ratio(gap))
    acc = _at(acc, slots, 32, exists * product * product)
    acc = _at(acc, slots, 33, constant.to(tl.float64))
    acc = _at(acc, slots, 34, fresh * n)
    acc = _at(acc, slots, 35, fresh * finite_n)
    acc = _at(acc, slots, 36, fresh * sum_k3)
    acc = _at(acc, slots, 37, stale * n)
    acc = _at(acc, slots, 38, stale * sum_k3)
    acc = _at(acc, slots, 39, tl.where(lag < 0, exists, 0.0))
    most = tl.where(most_slots == 0, most_tv, most)
    most = tl.where(most_slots == 1, tl.where(some > 0.0, gap, float("-inf")), most)
    most = tl.where(most_slots == 2, tl.where(some > 0.0, -gap, float("-inf")), most)

    if BINS:
        before = tl.full((), 0, tl.int32)
        for begin in range(0, length, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            train, rollout, mask = _read(train_ptr, rollout_ptr, mask_ptr, start, at, length, invalid)
            log_ratio, q = train - rollout, tl.exp(rollout)
            finite, k3, tv = mask & (log_ratio > _LOWEST), _k3(log_ratio), tl.abs(tl.exp(train) - q)
            ones = mask.to(tl.int32)
            x = before + tl.cumsum(ones) - 1
            before += tl.sum(ones)
            p_bin = _reached4(q, _P1, _P2, _P3, _P4)
            x_bin = _reached4(x, _X1, _X2, _X3, _X4) + (x >= _X5).to(tl.int32) + (x >= _X6).to(tl.int32)
            for label in range(_P_BINS):
                inside = p_bin == label
                acc = _add_bin(acc, slots, _TOTALS + 6 * label, mask & inside, finite & inside, log_ratio, k3, tv)
            for label in range(_X_BINS):
                inside = x_bin == label
                acc = _add_bin(
                    acc, slots, _TOTALS + 6 * (_P_BINS + label), mask & inside, finite & inside, log_ratio, k3, tv
                )
        l_bin = _reached4(lag, _L1, _L2, _L3, _L4) + (lag >= _L5).to(tl.int32) + (lag >= _L6).to(tl.int32)
        first_slot = _TOTALS + 6 * (_P_BINS + _X_BINS + l_bin)
        acc = _at(acc, slots, first_slot, n)
        acc = _at(acc, slots, first_slot + 1, finite_n)
        acc = _at(acc, slots, first_slot + 2, -sum_l)
        acc = _at(acc, slots, first_slot + 3, sum_abs)
        acc = _at(acc, slots, first_slot + 4, sum_k3)
        acc = _at(acc, slots, first_slot + 5, sum_tv)

    # The criteria: those of rows are decided here, those of tokens are summed up.
    failing = invalid
    for number in range(criteria):
        criterion_ptr = criteria_ptr + number * _WORDS
        code, scope = tl.load(criterion_ptr).to(tl.int32), tl.load(criterion_ptr + 1).to(tl.int32)
        agg, when = tl.load(criterion_ptr + 2).to(tl.int32), tl.load(criterion_ptr + 3).to(tl.int32)
        lower, upper = tl.load(criterion_ptr + 4), tl.load(criterion_ptr + 5)
        low32, high32 = tl.load(criterion_ptr + 6), tl.load(criterion_ptr + 7)
        total, low_n = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
        largest, advantage_sum = tl.full((), float("-inf"), tl.float64), tl.full((), 0.0, tl.float64)
        shown_total, failed = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
        shown_most, shown_least = tl.full((), float("-inf"), tl.float64), tl.full((), float("-inf"), tl.float64)
        for begin in range(0, length, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            train, rollout, mask = _read(train_ptr, rollout_ptr, mask_ptr, start, at, length, invalid)
            log_ratio = train - rollout
            advantage = log_ratio * 0.0
            if ADVANTAGES > 0:
                advantage = _advantages(advantages_ptr, row, start, at, mask, ADVANTAGES == 1)
            value = _statistic(code, train, rollout, log_ratio)
            shown = tl.where(code == 0, _ratio(value), value)
            total += _sum(value, mask)
            low = _below(value, lower, low32, SINGLE)
            low_n += _count(mask & low)
            largest = tl.maximum(largest, _most(value, mask))
            advantage_sum += _sum(advantage, mask)
            fails = (low | _above(value, upper, high32, SINGLE)) & _may_reject(when, advantage, log_ratio)
            failed += _count(mask & fails)
            shown_total += _sum(shown, mask)
            shown_most = tl.maximum(shown_most, _most(shown, mask))
            shown_least = tl.maximum(shown_least, _most(-shown, mask))
        units = n
        if scope == 1:
            aggregate = total
            if agg == 2:
                aggregate = total / tl.maximum(n, 1.0)
            if agg == 3:
                aggregate = largest
            units = exists
            bad = _above(aggregate, upper, high32, SINGLE)
            below = _below(aggregate, lower, low32, SINGLE)
            if agg == 3:
                below = low_n > 0.0
            bad = bad | below
            if code == 7:
                aggregate = lag.to(tl.float64)
                units = tl.where(lag >= 0, exists, 0.0)
                bad = (lag >= 0) & (aggregate > upper)
            bad = bad & _may_reject(when, advantage_sum / tl.maximum(n, 1.0), sum_all_l)
            bad = bad & (n > 0.0)
            failing = tl.maximum(failing, bad.to(tl.float64))
            failed = tl.where(bad, n, 0.0)
            value = tl.where(code == 0, _ratio(aggregate), aggregate)
            shown_total = tl.where(units > 0.0, value, 0.0)
            shown_most = tl.where(units > 0.0, value, float("-inf"))
            if (code != 0) | (agg != 3):
                shown_least = tl.where(units > 0.0, -value, float("-inf"))
        entry_ptr = places_ptr + 264 + 6 * number
        tl.store(totals_ptr + row * total_words + tl.load(entry_ptr), units)
        tl.store(totals_ptr + row * total_words + tl.load(entry_ptr + 1), shown_total)
        tl.store(totals_ptr + row * total_words + tl.load(entry_ptr + 2), failed)
        tl.store(totals_ptr + row * total_words + tl.load(entry_ptr + 3), (failed > 0.0).to(tl.float64))
        tl.store(maxima_ptr + row * maximum_words + tl.load(entry_ptr + 4), shown_most)
        tl.store(maxima_ptr + row * maximum_words + tl.load(entry_ptr + 5), shown_least)

    # What is kept, and the weights.
    row_raw = tl.full((), 0.0, tl.float64)
    w_lower, w_upper = tl.load(weights_ptr + 3), tl.load(weights_ptr + 4)
    w_low32, w_high32 = tl.load(weights_ptr + 5), tl.load(weights_ptr + 6)
    w_mask = tl.load(weights_ptr + 2) > 0.0
    if WEIGHTS == 3:
        exponent = sum_all_l
        if tl.load(weights_ptr + 1) == 2.0:
            exponent = sum_all_l / tl.maximum(n, 1.0)
        row_raw = _ratio(exponent)
    kept_n, prefix = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    for begin in range(0, length, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        train, rollout, mask = _read(train_ptr, rollout_ptr, mask_ptr, start, at, length, invalid)
        log_ratio = train - rollout
        advantage = log_ratio * 0.0
        if ADVANTAGES > 0:
            advantage = _advantages(advantages_ptr, row, start, at, mask, ADVANTAGES == 1)
        keep = mask & (at * 0.0 + failing == 0.0)
        for number in range(criteria):
            criterion_ptr = criteria_ptr + number * _WORDS
            if tl.load(criterion_ptr + 1) == 0.0:
                fails, _ = _judge(criterion_ptr, train, rollout, log_ratio, advantage, SINGLE)
                keep = keep & (fails == 0)
        kept_n += _count(keep)
        inside = at < length
        tl.store(keep_ptr + start + at, keep.to(keep_ptr.dtype.element_ty), mask=inside)
        if WEIGHTS > 0:
            raw = _ratio(log_ratio)
            if WEIGHTS == 2:
                raw = _ratio(prefix + tl.cumsum(tl.where(mask, log_ratio, 0.0)))
                prefix += _sum(log_ratio, mask)
            if WEIGHTS == 3:
                raw = log_ratio * 0.0 + row_raw
                raw = tl.where(mask, row_raw, 0.0)
            low, high = _below(raw, w_lower, w_low32, SINGLE), _above(raw, w_upper, w_high32, SINGLE)
            weight = tl.minimum(tl.maximum(raw, w_lower), w_upper)
            weight = tl.where(w_mask, tl.where(low | high, 0.0, raw), weight)
            tl.store(weight_ptr + start + at, tl.where(mask, weight, 0.0).to(tl.float32), mask=inside)
            unit = mask
            if WEIGHTS == 3:
                unit = mask & (at == first)
            acc = _at(acc, slots, 40, _count(unit))
            acc = _at(acc, slots, 41, _sum(weight, unit))
            acc = _at(acc, slots, 42, _sum(weight * weight, unit))
            acc = _at(acc, slots, 43, _sum(weight - 1.0, unit))
            acc = _at(acc, slots, 44, _sum((weight - 1.0) * (weight - 1.0), unit))
            acc = _at(acc, slots, 45, _sum(raw, unit))
            acc = _at(acc, slots, 46, _count(unit & high))
            acc = _at(acc, slots, 47, _count(unit & low))
            most = tl.where(most_slots == 3, tl.maximum(most, _most(weight, unit)), most)
            most = tl.where(most_slots == 4, tl.maximum(most, _most(-weight, unit)), most)
            most = tl.where(most_slots == 5, tl.maximum(most, _most(raw, unit)), most)
            most = tl.where(most_slots == 6, tl.maximum(most, _most(-raw, unit)), most)
    acc = _at(acc, slots, 2, all_tokens - kept_n)
    acc = _at(acc, slots, 3, (all_tokens > kept_n).to(tl.float64))
    acc = _at(acc, slots, 4, ((all_tokens > 0.0) & (kept_n == 0.0)).to(tl.float64))
    to_totals, to_maxima = tl.load(places_ptr + slots), tl.load(places_ptr + 256 + most_slots)
    tl.store(totals_ptr + row * total_words + to_totals, acc, mask=to_totals >= 0)
    tl.store(maxima_ptr + row * maximum_words + to_maxima, most, mask=to_maxima >= 0)


@triton.jit
def _reached4(value, a, b, c, d):
    return (value >= a).to(tl.int32) + (value >= b).to(tl.int32) + (value >= c).to(tl.int32) + (value >= d).to(tl.int32)


@triton.jit
def _add_bin(acc, slots, place, mask, finite, log_ratio, k3, tv):
    acc = _at(acc, slots, place, _count(mask))
    acc = _at(acc, slots, place + 1, _count(finite))
    acc = _at(acc, slots, place + 2, -_sum(log_ratio, finite))
    acc = _at(acc, slots, place + 3, _sum(tl.abs(log_ratio), finite))
    acc = _at(acc, slots, place + 4, _sum(k3, finite))
    return _at(acc, slots, place + 5, _sum(tv, mask))


assert ROW_TOTALS.index(s.WEIGHT_LOW) == 47 and len(ROW_TOTALS) + 6 * len(BIN_NAMES) <= 256 and len(ROW_MAXIMA) <= 8
