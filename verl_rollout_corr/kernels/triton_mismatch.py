"""The mismatch of a row on a GPU: invalid tokens, the sums of the row and of its bins, the histogram of l."""

# Triton's type hints describe a kernel's arguments as they are inside it, not as they are passed.
# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from verl_rollout_corr.kernels.triton_statistics import LOWEST, absolute, k3_of, ratio_of
from verl_rollout_corr.kernels.triton_table import ROW_TOTALS
from verl_rollout_corr.kernels.triton_tokens import added, count, largest_of, read, total_of
from verl_rollout_corr.maths.bins import POSITION, PROBABILITY, STALENESS
from verl_rollout_corr.maths.collection import CONSTANT_FROM, SUSPICIOUS_LOG_PROB
from verl_rollout_corr.maths.histogram import _FIRST, _SHIFT, CENTRE, SIDE
from verl_rollout_corr.maths.inputs import LEAST_ROLLOUT_LOG_PROB, LOG_PROB_SLACK

_TOTALS = tl.constexpr(len(ROW_TOTALS))
_P_BINS = tl.constexpr(len(PROBABILITY.labels))
_X_BINS = tl.constexpr(len(POSITION.labels))
_P1, _P2, _P3, _P4 = (tl.constexpr(edge) for edge in PROBABILITY.edges)
_X1, _X2, _X3, _X4, _X5, _X6 = (tl.constexpr(int(edge)) for edge in POSITION.edges)
_L1, _L2, _L3, _L4, _L5, _L6 = (tl.constexpr(int(edge)) for edge in STALENESS.edges)
_LEAST = tl.constexpr(LEAST_ROLLOUT_LOG_PROB)
_SLACK = tl.constexpr(LOG_PROB_SLACK)
_SUSPICIOUS = tl.constexpr(SUSPICIOUS_LOG_PROB)
_CONSTANT_FROM = tl.constexpr(CONSTANT_FROM)
_H_SHIFT, _H_FIRST = tl.constexpr(_SHIFT), tl.constexpr(_FIRST)
_H_CENTRE, _H_SIDE = tl.constexpr(CENTRE), tl.constexpr(SIDE)


@triton.jit
def survey(train_ptr, rollout_ptr, mask_ptr, start, length, BLOCK: tl.constexpr):
    """The response tokens of a row, the invalid ones among them, and the position of the first."""
    tokens, wrong = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    first = tl.full((), 0, tl.int32) + length
    for begin in range(0, length, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        train, rollout, mask = read(train_ptr, rollout_ptr, mask_ptr, start, at, length, 0.0)
        fine = (train <= _SLACK) & (rollout <= _SLACK) & (rollout >= _LEAST)
        tokens += count(mask)
        wrong += count(mask & (fine == 0))
        first = tl.minimum(first, tl.min(tl.where(mask, at, length)))
    return tokens, wrong, first


@triton.jit
def add_mismatch(
    acc,
    most,
    slots,
    most_slots,
    train_ptr,
    rollout_ptr,
    mask_ptr,
    counts_ptr,
    start,
    length,
    first,
    invalid,
    lag,
    BLOCK: tl.constexpr,
):
    """The mismatch of a row's tokens. Returns the accumulators, and the sums that bins and criteria need."""
    first_at = tl.minimum(first, length - 1)
    first_train = tl.load(train_ptr + start + first_at).to(tl.float64)
    first_rollout = tl.load(rollout_ptr + start + first_at).to(tl.float64)
    histogram = tl.zeros((512,), dtype=tl.int32)
    n, finite_n = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    sum_l, sum_all_l, sum_abs = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    sum_k3, sum_tv = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    sum_train, sum_rollout = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    other_train, other_rollout = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    most_tv = tl.full((), float("-inf"), tl.float64)
    for begin in range(0, length, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        train, rollout, mask = read(train_ptr, rollout_ptr, mask_ptr, start, at, length, invalid)
        log_ratio = train - rollout
        finite = mask & (log_ratio > LOWEST)
        p, q = tl.exp(train), tl.exp(rollout)
        k3, tv, ratio = k3_of(log_ratio), tl.abs(p - q), ratio_of(log_ratio)
        n += count(mask)
        finite_n += count(finite)
        sum_l += total_of(log_ratio, finite)
        sum_all_l += total_of(log_ratio, mask)
        sum_abs += total_of(tl.abs(log_ratio), finite)
        sum_k3 += total_of(k3, finite)
        sum_tv += total_of(tv, mask)
        sum_train += total_of(train, finite)
        sum_rollout += total_of(rollout, finite)
        other_train += count(mask & (train != first_train))
        other_rollout += count(mask & (rollout != first_rollout))
        most_tv = tl.maximum(most_tv, largest_of(tv, mask))
        acc = added(acc, slots, 10, total_of(absolute(log_ratio), mask))
        acc = added(acc, slots, 11, total_of(ratio * ratio, mask))
        acc = added(acc, slots, 13, count(mask & (rollout == 0.0) & (train < _SUSPICIOUS)))
        acc = added(acc, slots, 14, count(mask & (train == 0.0) & (rollout < _SUSPICIOUS)))
        frequent = mask & (q >= 0.5)
        rare = mask & (q < 0.5)
        centre = tl.where(frequent, 1.0, 0.0)
        off_p, off_q = p - centre, q - centre
        acc = added(acc, slots, 15, count(frequent))
        acc = added(acc, slots, 16, total_of(off_p, rare))
        acc = added(acc, slots, 17, total_of(off_q, rare))
        acc = added(acc, slots, 18, total_of(off_p, frequent))
        acc = added(acc, slots, 19, total_of(off_q, frequent))
        acc = added(acc, slots, 20, total_of(off_p * off_p, mask))
        acc = added(acc, slots, 21, total_of(off_q * off_q, mask))
        acc = added(acc, slots, 22, total_of(off_p * off_q, mask))
        bits = tl.abs(log_ratio).to(tl.int64, bitcast=True) >> _H_SHIFT
        reached = tl.minimum(tl.maximum(bits - (_H_FIRST - 1), 0), _H_SIDE + 1)
        index = tl.where(log_ratio < 0.0, _H_CENTRE - reached, _H_CENTRE + reached)
        index = tl.where(log_ratio < LOWEST, 0, index)
        histogram += tl.histogram(index.to(tl.int32), 512, mask=mask)
    counted = tl.arange(0, 512)
    tl.atomic_add(counts_ptr + counted, histogram.to(tl.int64), mask=histogram > 0)

    exists, some = (n > 0.0).to(tl.float64), (finite_n > 0.0).to(tl.float64)
    mean_train, mean_rollout = sum_train / tl.maximum(finite_n, 1.0), sum_rollout / tl.maximum(finite_n, 1.0)
    gap, product = mean_rollout - mean_train, ratio_of(sum_all_l)
    constant = (n >= _CONSTANT_FROM) & (other_rollout == 0.0) & (other_train > 0.0)
    fresh, stale = (lag == 0).to(tl.float64), (lag > 0).to(tl.float64)
    acc = added(acc, slots, 6, n)
    acc = added(acc, slots, 7, finite_n)
    acc = added(acc, slots, 8, -sum_l)
    acc = added(acc, slots, 9, sum_k3)
    acc = added(acc, slots, 12, sum_tv)
    acc = added(acc, slots, 23, exists)
    acc = added(acc, slots, 24, some)
    acc = added(acc, slots, 25, -mean_train)
    acc = added(acc, slots, 26, -mean_rollout)
    acc = added(acc, slots, 27, some * ratio_of(-mean_train))
    acc = added(acc, slots, 28, some * ratio_of(-mean_rollout))
    acc = added(acc, slots, 29, gap)
    acc = added(acc, slots, 30, tl.abs(gap))
    acc = added(acc, slots, 31, some * ratio_of(gap))
    acc = added(acc, slots, 32, exists * product * product)
    acc = added(acc, slots, 33, constant.to(tl.float64))
    acc = added(acc, slots, 34, fresh * n)
    acc = added(acc, slots, 35, fresh * finite_n)
    acc = added(acc, slots, 36, fresh * sum_k3)
    acc = added(acc, slots, 37, stale * n)
    acc = added(acc, slots, 38, stale * sum_k3)
    acc = added(acc, slots, 39, tl.where(lag < 0, exists, 0.0))
    most = tl.where(most_slots == 0, most_tv, most)
    most = tl.where(most_slots == 1, tl.where(some > 0.0, gap, float("-inf")), most)
    most = tl.where(most_slots == 2, tl.where(some > 0.0, -gap, float("-inf")), most)
    return acc, most, n, finite_n, sum_l, sum_all_l, sum_abs, sum_k3, sum_tv


@triton.jit
def add_bins(
    acc,
    slots,
    train_ptr,
    rollout_ptr,
    mask_ptr,
    start,
    length,
    invalid,
    lag,
    n,
    finite_n,
    sum_l,
    sum_abs,
    sum_k3,
    sum_tv,
    BLOCK: tl.constexpr,
):
    """The sums of each bin: by mu and by position from the tokens, by staleness from the sums of the row."""
    before = tl.full((), 0, tl.int32)
    for begin in range(0, length, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        train, rollout, mask = read(train_ptr, rollout_ptr, mask_ptr, start, at, length, invalid)
        log_ratio, q = train - rollout, tl.exp(rollout)
        finite, k3, tv = mask & (log_ratio > LOWEST), k3_of(log_ratio), tl.abs(tl.exp(train) - q)
        ones = mask.to(tl.int32)
        x = before + tl.cumsum(ones) - 1
        before += tl.sum(ones)
        p_bin = reached(q, _P1, _P2, _P3, _P4)
        x_bin = reached(x, _X1, _X2, _X3, _X4) + (x >= _X5).to(tl.int32) + (x >= _X6).to(tl.int32)
        for label in range(_P_BINS):
            inside = p_bin == label
            acc = add_bin(acc, slots, _TOTALS + 6 * label, mask & inside, finite & inside, log_ratio, k3, tv)
        for label in range(_X_BINS):
            inside = x_bin == label
            acc = add_bin(
                acc, slots, _TOTALS + 6 * (_P_BINS + label), mask & inside, finite & inside, log_ratio, k3, tv
            )
    l_bin = reached(lag, _L1, _L2, _L3, _L4) + (lag >= _L5).to(tl.int32) + (lag >= _L6).to(tl.int32)
    first_slot = _TOTALS + 6 * (_P_BINS + _X_BINS + l_bin)
    acc = added(acc, slots, first_slot, n)
    acc = added(acc, slots, first_slot + 1, finite_n)
    acc = added(acc, slots, first_slot + 2, -sum_l)
    acc = added(acc, slots, first_slot + 3, sum_abs)
    acc = added(acc, slots, first_slot + 4, sum_k3)
    acc = added(acc, slots, first_slot + 5, sum_tv)
    return acc


@triton.jit
def reached(value, a, b, c, d):
    """How many of four edges a value has reached."""
    return (value >= a).to(tl.int32) + (value >= b).to(tl.int32) + (value >= c).to(tl.int32) + (value >= d).to(tl.int32)


@triton.jit
def add_bin(acc, slots, place, mask, finite, log_ratio, k3, tv):
    """Adds the tokens of a block that are in one bin to its sums."""
    acc = added(acc, slots, place, count(mask))
    acc = added(acc, slots, place + 1, count(finite))
    acc = added(acc, slots, place + 2, -total_of(log_ratio, finite))
    acc = added(acc, slots, place + 3, total_of(tl.abs(log_ratio), finite))
    acc = added(acc, slots, place + 4, total_of(k3, finite))
    return added(acc, slots, place + 5, total_of(tv, mask))
