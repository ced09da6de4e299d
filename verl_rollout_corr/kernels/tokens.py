"""Stages that look at every token of a block, whatever the configuration: check, mismatch, bins."""

# pyright: basic
from __future__ import annotations

import math

from verl_rollout_corr.kernels import memory as m
from verl_rollout_corr.kernels.exponential import of_token
from verl_rollout_corr.kernels.machine import add, bits_of, get, get_int, larger, put, put_int, stage, sums
from verl_rollout_corr.maths.bins import PROBABILITY
from verl_rollout_corr.maths.collection import SUSPICIOUS_LOG_PROB
from verl_rollout_corr.maths.histogram import _FIRST, _SHIFT, CENTRE, SIDE
from verl_rollout_corr.maths.inputs import LEAST_ROLLOUT_LOG_PROB, LOG_PROB_SLACK


def reached_from(edge: float) -> float:
    """The smallest float64 x with exp(x) >= edge: comparing x with it equals comparing exp(x) with the edge."""
    x = math.log(edge)
    while math.exp(x) >= edge:
        x = math.nextafter(x, -math.inf)
    while math.exp(x) < edge:
        x = math.nextafter(x, math.inf)
    return x


_FREQUENT = reached_from(0.5)
_EDGES = (-1e300, *(reached_from(edge) for edge in PROBABILITY.edges), 1e300)
_E0, _E1, _E2, _E3, _E4, _E5 = _EDGES


@stage
def check(work, totals, settings, first, count):
    """Finds invalid log-probs, NaN among them, suspicious zeros, and whether the row is one constant so far."""
    invalid, zero_rollout, zero_train, other_rollout, other_train = 0, 0, 0, 0, 0
    first_train, first_rollout = get(work, m.FIRST_TRAIN), get(work, m.FIRST_ROLLOUT)
    for i in range(count):
        train, rollout = get(work, m.TRAIN + i), get(work, m.ROLLOUT + i)
        fine = (train <= LOG_PROB_SLACK) & (rollout <= LOG_PROB_SLACK) & (rollout >= LEAST_ROLLOUT_LOG_PROB)
        invalid += not fine
        zero_rollout += (rollout == 0.0) & (train < SUSPICIOUS_LOG_PROB)
        zero_train += (train == 0.0) & (rollout < SUSPICIOUS_LOG_PROB)
        other_rollout += rollout != first_rollout
        other_train += train != first_train
    put_int(work, m.INVALID, invalid)
    put(totals, m.ZERO_ROLLOUT, get(totals, m.ZERO_ROLLOUT) + zero_rollout)
    put(totals, m.ZERO_TRAIN, get(totals, m.ZERO_TRAIN) + zero_train)
    # 1: the engine's log-probs differ; 2: the trainer's do.
    put_int(work, m.CONSTANT, get_int(work, m.CONSTANT) | (other_rollout > 0) | (2 * (other_train > 0)))


@sums
def mismatch(work, totals, settings, first, count):
    """The statistics of each token, and their sums over the block."""
    finite, frequent = 0, 0
    sum_l, sum_abs, sum_k3, sum_tv, sum_off, sum_square, sum_rollout = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    rare_p, rare_q, frequent_p, frequent_q, pp, qq, pq = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    tv_max = get(totals, m.TV_MAX)
    for i in range(count):
        train, rollout = get(work, m.TRAIN + i), get(work, m.ROLLOUT + i)
        log_ratio, k3, ratio, off_one, difference, off_certain = of_token(train, rollout)
        put(work, m.LOG_RATIO + i, log_ratio)
        put(work, m.K3 + i, k3)
        put(work, m.RATIO + i, ratio)
        put(work, m.OFF_ONE + i, off_one)
        put(work, m.DIFFERENCE + i, difference)
        possible = log_ratio >= -1e300
        finite += possible
        sum_l += log_ratio if possible else 0.0
        sum_abs += abs(log_ratio) if possible else 0.0
        sum_k3 += k3 if possible else 0.0
        sum_rollout += rollout if possible else 0.0
        sum_tv += abs(difference)
        tv_max = larger(tv_max, abs(difference))
        sum_off += abs(off_one)
        sum_square += ratio * ratio
        often = rollout >= _FREQUENT
        frequent += often
        q = off_certain if often else off_certain + 1.0
        p = q + difference
        frequent_p += p if often else 0.0
        frequent_q += q if often else 0.0
        rare_p += 0.0 if often else p
        rare_q += 0.0 if often else q
        pp += p * p
        qq += q * q
        pq += p * q
    put(totals, m.TV_MAX, tv_max)
    b = m.BLOCK_SUMS
    put(work, b + m.N, float(count))
    put(work, b + m.FINITE, float(finite))
    put(work, b + m.L, sum_l)
    put(work, b + m.ABS_L, sum_abs)
    put(work, b + m.K3_SUM, sum_k3)
    put(work, b + m.TV, sum_tv)
    put(work, b + m.OFF_ONE_SUM, sum_off)
    put(work, b + m.SQUARE, sum_square)
    put(work, b + m.ROLLOUT_SUM, sum_rollout)
    add(totals, m.MOMENTS, float(frequent))
    add(totals, m.MOMENTS + 1, rare_p)
    add(totals, m.MOMENTS + 2, rare_q)
    add(totals, m.MOMENTS + 3, frequent_p)
    add(totals, m.MOMENTS + 4, frequent_q)
    add(totals, m.MOMENTS + 5, pp)
    add(totals, m.MOMENTS + 6, qq)
    add(totals, m.MOMENTS + 7, pq)


@sums
def probability_bins(work, totals, settings, first, count):
    """Sums of the tokens of each bin of mu. Five passes over slots in the cache: 30 sums do not fit into registers."""
    low = _E0
    for label in range(5):
        high = _E1 if label == 0 else _E2 if label == 1 else _E3 if label == 2 else _E4 if label == 3 else _E5
        n, finite, sum_l, sum_abs, sum_k3, sum_tv = 0, 0, 0.0, 0.0, 0.0, 0.0
        for i in range(count):
            rollout, log_ratio = get(work, m.ROLLOUT + i), get(work, m.LOG_RATIO + i)
            inside = (rollout >= low) & (rollout < high)
            counted = inside & (log_ratio >= -1e300)
            n += inside
            finite += counted
            sum_l += log_ratio if counted else 0.0
            sum_abs += abs(log_ratio) if counted else 0.0
            sum_k3 += get(work, m.K3 + i) if counted else 0.0
            sum_tv += abs(get(work, m.DIFFERENCE + i)) if inside else 0.0
        at = m.PROBABILITY_SUMS + label * m.BIN_WORDS
        add(totals, at + m.N, float(n))
        add(totals, at + m.FINITE, float(finite))
        add(totals, at + m.L, sum_l)
        add(totals, at + m.ABS_L, sum_abs)
        add(totals, at + m.K3_SUM, sum_k3)
        add(totals, at + m.TV, sum_tv)
        low = high


@stage
def histogram(work, totals, settings, first, count):
    """Counts l in the bins of `maths.histogram`, read off its bits."""
    for i in range(count):
        log_ratio = get(work, m.LOG_RATIO + i)
        reached = (bits_of(abs(log_ratio)) >> _SHIFT) - (_FIRST - 1)
        reached = min(max(reached, 0), SIDE + 1)
        index = CENTRE - reached if log_ratio < 0 else CENTRE + reached
        index = 0 if log_ratio < -1e300 else index
        put_int(work, m.SCRATCH + i, m.HISTOGRAM + 2 * index + (i & 1))
    for i in range(count):
        index = get_int(work, m.SCRATCH + i)
        put_int(totals, index, get_int(totals, index) + 1)
