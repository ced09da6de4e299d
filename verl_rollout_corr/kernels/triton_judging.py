"""The criteria on a GPU: verdicts about tokens of a block and about a row, and what their metrics show."""

# Triton's type hints describe a kernel's arguments as they are inside it, not as they are passed.
# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from verl_rollout_corr.kernels.triton_statistics import ratio_of, statistic
from verl_rollout_corr.kernels.triton_tokens import (
    above,
    below,
    count,
    largest_of,
    may_reject,
    read,
    read_advantages,
    total_of,
)


@triton.jit
def judge_tokens(criterion_ptr, train, rollout, log_ratio, advantage, SINGLE: tl.constexpr):
    """A token criterion on a block: which tokens fail, and the value that its metrics show."""
    code, when = tl.load(criterion_ptr).to(tl.int32), tl.load(criterion_ptr + 3).to(tl.int32)
    value = statistic(code, train, rollout, log_ratio)
    low = below(value, tl.load(criterion_ptr + 4), tl.load(criterion_ptr + 6), SINGLE)
    high = above(value, tl.load(criterion_ptr + 5), tl.load(criterion_ptr + 7), SINGLE)
    fails = (low | high) & may_reject(when, advantage, log_ratio)
    return fails, tl.where(code == 0, ratio_of(value), value)


@triton.jit
def judge_row(
    failing,
    number,
    criterion_ptr,
    train_ptr,
    rollout_ptr,
    mask_ptr,
    advantages_ptr,
    places_ptr,
    totals_ptr,
    maxima_ptr,
    total_words,
    maximum_words,
    row,
    start,
    length,
    invalid,
    lag,
    n,
    sum_all_l,
    BLOCK: tl.constexpr,
    SINGLE: tl.constexpr,
    ADVANTAGES: tl.constexpr,
):
    """A criterion on a row: writes its sums, and returns whether the row fails, by this one or one before.

    Token criteria are summed up here; which tokens they reject is decided where the answer is written.
    """
    exists = (n > 0.0).to(tl.float64)
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
        train, rollout, mask = read(train_ptr, rollout_ptr, mask_ptr, start, at, length, invalid)
        log_ratio = train - rollout
        advantage = log_ratio * 0.0
        if ADVANTAGES > 0:
            advantage = read_advantages(advantages_ptr, row, start, at, mask, ADVANTAGES == 1)
        value = statistic(code, train, rollout, log_ratio)
        shown = tl.where(code == 0, ratio_of(value), value)
        total += total_of(value, mask)
        low = below(value, lower, low32, SINGLE)
        low_n += count(mask & low)
        largest = tl.maximum(largest, largest_of(value, mask))
        advantage_sum += total_of(advantage, mask)
        fails = (low | above(value, upper, high32, SINGLE)) & may_reject(when, advantage, log_ratio)
        failed += count(mask & fails)
        shown_total += total_of(shown, mask)
        shown_most = tl.maximum(shown_most, largest_of(shown, mask))
        shown_least = tl.maximum(shown_least, largest_of(-shown, mask))
    units = n
    if scope == 1:
        aggregate = total
        if agg == 2:
            aggregate = total / tl.maximum(n, 1.0)
        if agg == 3:
            aggregate = largest
        units = exists
        bad = above(aggregate, upper, high32, SINGLE)
        under = below(aggregate, lower, low32, SINGLE)
        if agg == 3:
            under = low_n > 0.0
        bad = bad | under
        if code == 7:
            aggregate = lag.to(tl.float64)
            units = tl.where(lag >= 0, exists, 0.0)
            bad = (lag >= 0) & (aggregate > upper)
        bad = bad & may_reject(when, advantage_sum / tl.maximum(n, 1.0), sum_all_l)
        bad = bad & (n > 0.0)
        failing = tl.maximum(failing, bad.to(tl.float64))
        failed = tl.where(bad, n, 0.0)
        value = tl.where(code == 0, ratio_of(aggregate), aggregate)
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
    return failing
