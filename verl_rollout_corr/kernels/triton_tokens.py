"""Blocks of tokens on a GPU: read, compared with bounds, and summed up."""

# Triton's type hints describe a kernel's arguments as they are inside it, not as they are passed.
# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def below(value, bound, rounded, SINGLE: tl.constexpr):
    """Whether the value is below the bound, -inf where there is none; in float32 where the log-probs were no wider."""
    narrow = value.to(tl.float32).to(tl.float64)
    single = tl.where(tl.abs(narrow) < float("inf"), narrow < rounded, value < bound)
    return single if SINGLE else value < bound


@triton.jit
def above(value, bound, rounded, SINGLE: tl.constexpr):
    """The same above the bound, +inf where there is none."""
    narrow = value.to(tl.float32).to(tl.float64)
    single = tl.where(tl.abs(narrow) < float("inf"), narrow > rounded, value > bound)
    return single if SINGLE else value > bound


@triton.jit
def may_reject(when, advantage, log_ratio):
    """Whether `when` allows the criterion to reject a unit, by the unit's mean advantage and its sum of l."""
    outward = ((advantage > 0.0) & (log_ratio > 0.0)) | ((advantage < 0.0) & (log_ratio < 0.0))
    negative, positive = (when == 1) & (advantage < 0.0), (when == 2) & (advantage > 0.0)
    return (when == 0) | negative | positive | ((when == 3) & outward)


@triton.jit
def read(train_ptr, rollout_ptr, mask_ptr, start, at, length, invalid):
    """The log-probs and the mask of a block of a row: 0 where the mask is 0, and everywhere if `invalid` is not 0."""
    # Triton's interpreter takes a truth of the whole row for a number beside truths of tokens: so it is a number.
    inside = at < length
    mask = (tl.load(mask_ptr + start + at, mask=inside, other=0) != 0) & inside & (at * 0.0 + invalid == 0.0)
    train = tl.load(train_ptr + start + at, mask=mask, other=0.0).to(tl.float64)
    rollout = tl.load(rollout_ptr + start + at, mask=mask, other=0.0).to(tl.float64)
    return tl.where(mask, train, 0.0), tl.where(mask, rollout, 0.0), mask


@triton.jit
def read_advantages(advantages_ptr, row, start, at, mask, PER_ROW: tl.constexpr):
    """The advantages of a block, or of its row for each token."""
    where = row + at * 0 if PER_ROW else start + at
    value = tl.load(advantages_ptr + where, mask=mask, other=0.0).to(tl.float64)
    return tl.where(mask, value, 0.0)


@triton.jit
def total_of(values, where):
    """The sum of the values where something holds."""
    return tl.sum(tl.where(where, values, 0.0))


@triton.jit
def count(where):
    """How often something holds."""
    return tl.sum(where.to(tl.int32)).to(tl.float64)


@triton.jit
def largest_of(values, where):
    """The largest value where something holds, else -inf."""
    return tl.max(tl.where(where, values, float("-inf")))


@triton.jit
def added(acc, slots, index, value):
    """The accumulators with a value added to one of them."""
    return acc + tl.where(slots == index, value, 0.0)
