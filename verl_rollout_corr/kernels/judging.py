"""Stages of the criteria and of the weights: per token, and per unit (a turn or a row), whose sums close at its end."""

# pyright: basic
from __future__ import annotations

import math

from verl_rollout_corr.kernels import memory as m
from verl_rollout_corr.kernels.exponential import ratio
from verl_rollout_corr.kernels.machine import add, get, get_int, inline, inline_sums, larger, put, put_int, smaller
from verl_rollout_corr.kernels.stages import stage, sums

NEGATIVE, POSITIVE, OUTWARD = 1, 2, 3
"""Codes of `when`; 0 is none."""

SUM, MEAN, MAX, LAG = 0, 1, 2, 3
"""Codes of the aggregation. LAG: the value is the row's lag."""


@inline
def may_reject(when, advantage, log_ratio):
    """Whether `when` allows the criterion to reject a token or unit."""
    negative = (when == NEGATIVE) & (advantage < 0.0)
    positive = (when == POSITIVE) & (advantage > 0.0)
    outward = ((advantage > 0.0) & (log_ratio > 0.0)) | ((advantage < 0.0) & (log_ratio < 0.0))
    return (when == 0) | negative | positive | ((when == OUTWARD) & outward)


@stage
def may_tokens(work, totals, settings, first, count):
    """Writes into the slot MAY which tokens `when` allows a criterion to reject."""
    when = get_int(settings, m.S_WHEN)
    for i in range(count):
        may = may_reject(when, get(work, m.ADVANTAGE + i), get(work, m.LOG_RATIO + i))
        put_int(work, m.MAY + i, 1 if may else 0)


@stage
def count_nan(work, totals, settings, first, count):
    """Counts the advantages that are NaN, over all rows of this thread."""
    found = 0
    for i in range(count):
        advantage = get(work, m.ADVANTAGE + i)
        found += advantage != advantage
    put_int(settings, m.S_COUNT, get_int(settings, m.S_COUNT) + found)


@sums
def judge_tokens(work, totals, settings, first, count):
    """A token criterion: clears KEEP where tokens fail, and adds its statistic to its sums."""
    slot, value_slot, out = get_int(settings, m.S_SLOT), get_int(settings, m.S_VALUE), get_int(settings, m.S_OUT)
    lower, upper, may_slot = get(settings, m.S_LOWER), get(settings, m.S_UPPER), get_int(settings, m.S_MAY)
    failed = 0
    for i in range(count):
        statistic = get(work, slot + i)
        fails = ((statistic > upper) | (statistic < lower)) & (get_int(work, may_slot + i) != 0)
        failed += fails
        put_int(work, m.KEEP + i, 0 if fails else get_int(work, m.KEEP + i))
    put_int(settings, m.ROW_FAILED, get_int(settings, m.ROW_FAILED) | (failed > 0))
    add(totals, out + m.TOKENS, float(failed))
    sum_values(work, totals, value_slot, out, count)


@inline
def may_leave(work, slot, may_slot, i):
    """Whether a criterion of the batch may reject a token: `when` allows it, and its statistic is not -inf."""
    return (get(work, slot + i) >= -1e300) & (get_int(work, may_slot + i) != 0)


@sums
def sum_statistic(work, totals, settings, first, count):
    """A criterion of the batch scope, which is judged after all rows.

    Behind the criterion's sums are the sum and the number of the tokens that may not leave, which still count in the
    mean unless their statistic is -inf, and then of those that may.
    """
    slot, may_slot, out = get_int(settings, m.S_SLOT), get_int(settings, m.S_MAY), get_int(settings, m.S_OUT)
    fixed, fixed_n, loose, loose_n = 0.0, 0, 0.0, 0
    for i in range(count):
        statistic = get(work, slot + i)
        leaves = may_leave(work, slot, may_slot, i)
        stays = (statistic >= -1e300) & (not leaves)
        fixed += statistic if stays else 0.0
        fixed_n += stays
        loose += statistic if leaves else 0.0
        loose_n += leaves
    add(totals, out + m.CRITERION_WORDS, fixed)
    add(totals, out + m.CRITERION_WORDS + 1, float(fixed_n))
    add(totals, out + m.CRITERION_WORDS + 2, loose)
    add(totals, out + m.CRITERION_WORDS + 3, float(loose_n))
    sum_values(work, totals, get_int(settings, m.S_VALUE), out, count)


@inline_sums
def sum_values(work, totals, slot, out, count):
    """Adds the values of single tokens to a criterion's sums."""
    total, largest, smallest = 0.0, get(totals, out + m.MAXIMUM), get(totals, out + m.MINIMUM)
    for i in range(count):
        value = get(work, slot + i)
        total += value
        largest = larger(largest, value)
        smallest = smaller(smallest, value)
    add(totals, out + m.UNITS, float(count))
    add(totals, out + m.TOTAL, total)
    put(totals, out + m.MAXIMUM, largest)
    put(totals, out + m.MINIMUM, smallest)


@sums
def gather(work, totals, settings, first, count):
    """Adds tokens [first, first + count) of the block to the sums of their unit."""
    slot, lower = get_int(settings, m.S_SLOT), get(settings, m.S_LOWER)
    total, largest, smallest, low = 0.0, get(settings, m.U_MAX), get(settings, m.U_MIN), 0
    for i in range(first, first + count):
        statistic = get(work, slot + i)
        total += statistic
        largest = larger(largest, statistic)
        smallest = smaller(smallest, statistic)
        low += statistic < lower
    add(settings, m.U_SUM, total)
    put(settings, m.U_MAX, largest)
    put(settings, m.U_MIN, smallest)
    add(settings, m.U_LOW, float(low))
    if get_int(settings, m.S_WHEN) != 0:
        advantage, log_ratio = 0.0, 0.0
        for i in range(first, first + count):
            advantage += get(work, m.ADVANTAGE + i)
            log_ratio += get(work, m.LOG_RATIO + i)
        add(settings, m.U_ADVANTAGE, advantage)
        add(settings, m.U_L, log_ratio)


@inline
def start_unit(settings):
    """Resets the state of the previous unit."""
    put(settings, m.U_SUM, 0.0)
    put(settings, m.U_MAX, -math.inf)
    put(settings, m.U_MIN, math.inf)
    put(settings, m.U_LOW, 0.0)
    put(settings, m.U_ADVANTAGE, 0.0)
    put(settings, m.U_L, 0.0)


@inline
def aggregated(work, settings, count):
    """The unit's value."""
    agg, total = get_int(settings, m.S_AGG), get(settings, m.U_SUM)
    if agg == LAG:
        return float(get_int(work, m.LAG))
    if agg == MEAN:
        return total / count
    return get(settings, m.U_MAX) if agg == MAX else total


@stage
def close_criterion(work, totals, settings, first, count):
    """At the end of a unit of `count` tokens: decides whether it passes, and adds its value to the sums."""
    value, agg = aggregated(work, settings, count), get_int(settings, m.S_AGG)
    lower, upper = get(settings, m.S_LOWER), get(settings, m.S_UPPER)
    # A maximum does not show whether a token is below the lower bound, so that bound is compared with each token.
    fails = (value > upper) | (get(settings, m.U_LOW) > 0.0 if agg == MAX else value < lower)
    known = (agg != LAG) | (value >= 0.0)
    when = get_int(settings, m.S_WHEN)
    fails = fails & known & may_reject(when, get(settings, m.U_ADVANTAGE), get(settings, m.U_L))
    out = get_int(settings, m.S_OUT)
    if fails:
        add(totals, out + m.TOKENS, float(count))
        put_int(settings, m.ROW_FAILED, 1)
        put_int(work, m.FAILED, 1)
    smallest = value
    if get_int(settings, m.S_RATIO) != 0:
        smallest = ratio(get(settings, m.U_MIN) if agg == MAX else value)
        value = ratio(value)
    if known:
        add(totals, out + m.UNITS, 1.0)
        add(totals, out + m.TOTAL, value)
        put(totals, out + m.MAXIMUM, max(get(totals, out + m.MAXIMUM), value))
        put(totals, out + m.MINIMUM, min(get(totals, out + m.MINIMUM), smallest))
    start_unit(settings)
