"""Stages of the weights: per token, per unit, per prefix; and their sums."""

# pyright: basic
from __future__ import annotations

from verl_rollout_corr.kernels import memory as m
from verl_rollout_corr.kernels.exponential import ratio
from verl_rollout_corr.kernels.judging import MEAN, start_unit
from verl_rollout_corr.kernels.machine import add, get, get_int, inline, larger, put, smaller
from verl_rollout_corr.kernels.stages import stage, sums


@inline
def applied(raw, settings):
    """The weight within its bounds: outside of them it becomes the nearer bound, or 0. Unused bounds are infinite."""
    low, high = raw < get(settings, m.S_LOW), raw > get(settings, m.S_HIGH)
    outside = (get_int(settings, m.S_MASK_OUTSIDE) != 0) & (low | high)
    weight = min(max(raw, get(settings, m.S_LOWER)), get(settings, m.S_UPPER))
    return (0.0 if outside else weight), low, high


@sums
def weigh_tokens(work, totals, settings, first, count):
    """Weights of single tokens, from the raw ones in a slot; kept in the buffer if they are to be normalised."""
    out, slot, buffer = get_int(settings, m.S_OUT), get_int(settings, m.S_SLOT), get_int(settings, m.S_BUFFER)
    low_from, high_from = get(settings, m.S_LOW), get(settings, m.S_HIGH)
    lower, upper = get(settings, m.S_LOWER), get(settings, m.S_UPPER)
    masked = get_int(settings, m.S_MASK_OUTSIDE) != 0
    total, square, off, off_square, sum_raw, highs, lows = 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0
    most, least = get(totals, out + m.W_MAX), get(totals, out + m.W_MIN)
    raw_most, raw_least = get(totals, out + m.W_RAW_MAX), get(totals, out + m.W_RAW_MIN)
    for i in range(count):
        raw = get(work, slot + i)
        low, high = raw < low_from, raw > high_from
        weight = smaller(larger(raw, lower), upper)
        weight = 0.0 if masked & (low | high) else weight
        put(work, m.WEIGHT + i, weight)
        total += weight
        square += weight * weight
        off += weight - 1.0
        off_square += (weight - 1.0) * (weight - 1.0)
        sum_raw += raw
        lows += low
        highs += high
        most, least = larger(most, weight), smaller(least, weight)
        raw_most, raw_least = larger(raw_most, raw), smaller(raw_least, raw)
    add(totals, out + m.W_UNITS, float(count))
    add(totals, out + m.W_TOTAL, total)
    add(totals, out + m.W_SQUARE, square)
    add(totals, out + m.W_OFF_ONE, off)
    add(totals, out + m.W_OFF_ONE_SQUARE, off_square)
    add(totals, out + m.W_RAW, sum_raw)
    add(totals, out + m.W_HIGH, float(highs))
    add(totals, out + m.W_LOW, float(lows))
    put(totals, out + m.W_MAX, most)
    put(totals, out + m.W_MIN, least)
    put(totals, out + m.W_RAW_MAX, raw_most)
    put(totals, out + m.W_RAW_MIN, raw_least)
    if buffer != 0:
        for i in range(count):
            put(buffer, first + i, get(work, m.WEIGHT + i))


@stage
def prefix_ratios(work, totals, settings, first, count):
    """Writes exp(sum of l up to each token of the row) into the slot PREFIX; 0 from a token of probability 0 on."""
    total = get(settings, m.U_SUM)
    for i in range(count):
        total += get(work, m.LOG_RATIO + i)
        put(work, m.SCRATCH + i, total)
    put(settings, m.U_SUM, total)
    for i in range(count):
        put(work, m.PREFIX + i, ratio(get(work, m.SCRATCH + i)))


@stage
def close_weight(work, totals, settings, first, count):
    """The weight of a unit of `count` tokens; `first`: its position in the buffer, if it is to be normalised."""
    exponent = get(settings, m.U_SUM)
    raw = ratio(exponent / count if get_int(settings, m.S_AGG) == MEAN else exponent)
    weight, low, high = applied(raw, settings)
    out = get_int(settings, m.S_OUT)
    add(totals, out + m.W_UNITS, 1.0)
    add(totals, out + m.W_RAW, raw)
    add(totals, out + m.W_HIGH, 1.0 if high else 0.0)
    add(totals, out + m.W_LOW, 1.0 if low else 0.0)
    put(totals, out + m.W_RAW_MAX, max(get(totals, out + m.W_RAW_MAX), raw))
    put(totals, out + m.W_RAW_MIN, min(get(totals, out + m.W_RAW_MIN), raw))
    add_weight(totals, out, weight)
    put(work, m.UNIT_WEIGHT, weight)
    if get_int(settings, m.S_BUFFER) != 0:
        put(get_int(settings, m.S_BUFFER), first, weight)
    start_unit(settings)


@inline
def add_weight(totals, out, weight):
    """Adds one applied weight to the sums."""
    add(totals, out + m.W_TOTAL, weight)
    add(totals, out + m.W_SQUARE, weight * weight)
    add(totals, out + m.W_OFF_ONE, weight - 1.0)
    add(totals, out + m.W_OFF_ONE_SQUARE, (weight - 1.0) * (weight - 1.0))
    put(totals, out + m.W_MAX, max(get(totals, out + m.W_MAX), weight))
    put(totals, out + m.W_MIN, min(get(totals, out + m.W_MIN), weight))
