"""The device side of the twin on a GPU: one program per row, which walks over the row's tokens in blocks.

It is written for Triton. It reads a table of the criteria and of the weights, so that it is compiled once, and not once
per preset. `maths` says what each number means. Sums are float64, as there.
"""

# Triton's type hints describe a kernel's arguments as they are inside it, not as they are passed.
# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from verl_rollout_corr.kernels.triton_judging import judge_row, judge_tokens
from verl_rollout_corr.kernels.triton_mismatch import add_bins, add_mismatch, survey
from verl_rollout_corr.kernels.triton_statistics import ratio_of
from verl_rollout_corr.kernels.triton_table import CRITERION_WORDS
from verl_rollout_corr.kernels.triton_tokens import (
    above,
    added,
    below,
    count,
    largest_of,
    read,
    read_advantages,
    total_of,
)

_WORDS = tl.constexpr(CRITERION_WORDS)


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

    all_tokens, wrong, first = survey(train_ptr, rollout_ptr, mask_ptr, start, length, BLOCK)
    invalid = (wrong > 0.0).to(tl.float64)

    acc, most, n, finite_n, sum_l, sum_all_l, sum_abs, sum_k3, sum_tv = add_mismatch(
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
        BLOCK,
    )
    acc = added(acc, slots, 0, all_tokens)
    acc = added(acc, slots, 1, (all_tokens > 0.0).to(tl.float64))
    acc = added(acc, slots, 5, invalid)
    if BINS:
        acc = add_bins(
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
            BLOCK,
        )
    failing = invalid
    for number in range(criteria):
        failing = judge_row(
            failing,
            number,
            criteria_ptr + number * _WORDS,
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
            BLOCK,
            SINGLE,
            ADVANTAGES,
        )

    # What is kept, and the weights.
    row_raw = tl.full((), 0.0, tl.float64)
    w_lower, w_upper = tl.load(weights_ptr + 3), tl.load(weights_ptr + 4)
    w_low32, w_high32 = tl.load(weights_ptr + 5), tl.load(weights_ptr + 6)
    w_mask = tl.load(weights_ptr + 2) > 0.0
    if WEIGHTS == 3:
        exponent = sum_all_l
        if tl.load(weights_ptr + 1) == 2.0:
            exponent = sum_all_l / tl.maximum(n, 1.0)
        row_raw = ratio_of(exponent)
    kept_n, prefix = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    for begin in range(0, length, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        train, rollout, mask = read(train_ptr, rollout_ptr, mask_ptr, start, at, length, invalid)
        log_ratio = train - rollout
        advantage = log_ratio * 0.0
        if ADVANTAGES > 0:
            advantage = read_advantages(advantages_ptr, row, start, at, mask, ADVANTAGES == 1)
        keep = mask & (at * 0.0 + failing == 0.0)
        for number in range(criteria):
            criterion_ptr = criteria_ptr + number * _WORDS
            if tl.load(criterion_ptr + 1) == 0.0:
                fails, _ = judge_tokens(criterion_ptr, train, rollout, log_ratio, advantage, SINGLE)
                keep = keep & (fails == 0)
        kept_n += count(keep)
        inside = at < length
        tl.store(keep_ptr + start + at, keep.to(keep_ptr.dtype.element_ty), mask=inside)
        if WEIGHTS > 0:
            raw = ratio_of(log_ratio)
            if WEIGHTS == 2:
                raw = ratio_of(prefix + tl.cumsum(tl.where(mask, log_ratio, 0.0)))
                prefix += total_of(log_ratio, mask)
            if WEIGHTS == 3:
                raw = log_ratio * 0.0 + row_raw
                raw = tl.where(mask, row_raw, 0.0)
            low, high = below(raw, w_lower, w_low32, SINGLE), above(raw, w_upper, w_high32, SINGLE)
            weight = tl.minimum(tl.maximum(raw, w_lower), w_upper)
            weight = tl.where(w_mask, tl.where(low | high, 0.0, raw), weight)
            tl.store(weight_ptr + start + at, tl.where(mask, weight, 0.0).to(tl.float32), mask=inside)
            unit = mask
            if WEIGHTS == 3:
                unit = mask & (at == first)
            acc = added(acc, slots, 40, count(unit))
            acc = added(acc, slots, 41, total_of(weight, unit))
            acc = added(acc, slots, 42, total_of(weight * weight, unit))
            acc = added(acc, slots, 43, total_of(weight - 1.0, unit))
            acc = added(acc, slots, 44, total_of((weight - 1.0) * (weight - 1.0), unit))
            acc = added(acc, slots, 45, total_of(raw, unit))
            acc = added(acc, slots, 46, count(unit & high))
            acc = added(acc, slots, 47, count(unit & low))
            most = tl.where(most_slots == 3, tl.maximum(most, largest_of(weight, unit)), most)
            most = tl.where(most_slots == 4, tl.maximum(most, largest_of(-weight, unit)), most)
            most = tl.where(most_slots == 5, tl.maximum(most, largest_of(raw, unit)), most)
            most = tl.where(most_slots == 6, tl.maximum(most, largest_of(-raw, unit)), most)
    acc = added(acc, slots, 2, all_tokens - kept_n)
    acc = added(acc, slots, 3, (all_tokens > kept_n).to(tl.float64))
    acc = added(acc, slots, 4, ((all_tokens > 0.0) & (kept_n == 0.0)).to(tl.float64))
    to_totals, to_maxima = tl.load(places_ptr + slots), tl.load(places_ptr + 256 + most_slots)
    tl.store(totals_ptr + row * total_words + to_totals, acc, mask=to_totals >= 0)
    tl.store(maxima_ptr + row * maximum_words + to_maxima, most, mask=to_maxima >= 0)
