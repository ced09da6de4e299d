"""Stages that look at every token of a block, whatever the configuration: check, mismatch, bins."""

# pyright: basic
from __future__ import annotations

import math

from verl_rollout_corr.kernels import memory as m
from verl_rollout_corr.kernels.exponential import of_token
from verl_rollout_corr.kernels.machine import add, bits_of, get, get_int, inline, inline_sums, larger, put, put_int
from verl_rollout_corr.kernels.stages import stage, sums
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


_NEAR = -19.9
"""Log-probs from here up to 1e-3 have a log-ratio that is not clipped."""

_FREQUENT = reached_from(0.5)
_E1, _E2, _E3, _E4 = (reached_from(edge) for edge in PROBABILITY.edges)


@stage
def check(work, totals, settings, first, count):
    """Finds invalid log-probs, NaN among them, small ones, suspicious zeros, and whether the row is one constant."""
    unusual = 0
    for i in range(count):
        train, rollout = get(work, m.TRAIN + i), get(work, m.ROLLOUT + i)
        # Comparisons with NaN are false: the first of these choices keeps the engine's NaN, the second the trainer's.
        above = train if train > rollout else rollout
        below = rollout if rollout < train else train
        usual = (above <= LOG_PROB_SLACK) & (below >= _NEAR)
        unusual |= (not usual) | ((above == 0.0) & (below < SUSPICIOUS_LOG_PROB))
    put_int(work, m.INVALID, 0)
    put_int(work, m.FAR, 0)
    if unusual != 0:
        check_unusual(work, totals, count)
    if get_int(work, m.CONSTANT) != 3:
        check_constant(work, count)


@inline
def check_unusual(work, totals, count):
    """Looks for what is unusual in a block. Few blocks need this second look."""
    invalid, far, zero_rollout, zero_train = 0, 0, 0, 0
    for i in range(count):
        train, rollout = get(work, m.TRAIN + i), get(work, m.ROLLOUT + i)
        fine = (train <= LOG_PROB_SLACK) & (rollout <= LOG_PROB_SLACK) & (rollout >= LEAST_ROLLOUT_LOG_PROB)
        invalid += not fine
        far += (train < _NEAR) | (rollout < _NEAR)
        zero_rollout += (rollout == 0.0) & (train < SUSPICIOUS_LOG_PROB)
        zero_train += (train == 0.0) & (rollout < SUSPICIOUS_LOG_PROB)
    put_int(work, m.INVALID, invalid)
    put_int(work, m.FAR, far)
    add(totals, m.ZERO_ROLLOUT, float(zero_rollout))
    add(totals, m.ZERO_TRAIN, float(zero_train))


@inline
def check_constant(work, count):
    """Whether log-probs differ from the row's first, up to this block. Bit 1: the engine's do; bit 2: the trainer's."""
    first_train, first_rollout = get(work, m.FIRST_TRAIN), get(work, m.FIRST_ROLLOUT)
    other_rollout, other_train = 0, 0
    for i in range(count):
        other_rollout |= get(work, m.ROLLOUT + i) != first_rollout
        other_train |= get(work, m.TRAIN + i) != first_train
    put_int(work, m.CONSTANT, get_int(work, m.CONSTANT) | other_rollout | (2 * other_train))


@sums
def mismatch(work, totals, settings, first, count):
    """The statistics of each token, and their sums over the block."""
    if get_int(work, m.FAR) == 0:
        sum_mismatch(work, totals, count, True, False)
    else:
        sum_mismatch(work, totals, count, False, False)


@stage
def log_ratios(work, totals, settings, first, count):
    """The log-ratio of each token alone."""
    for i in range(count):
        put(work, m.LOG_RATIO + i, get(work, m.TRAIN + i) - get(work, m.ROLLOUT + i))


@sums
def mismatch_in_bins(work, totals, settings, first, count):
    """The same, and the sums of each bin of mu, from which those of the block follow."""
    if get_int(work, m.FAR) == 0:
        sum_mismatch(work, totals, count, True, True)
        sum_bins(work, totals, count, True)
    else:
        sum_mismatch(work, totals, count, False, True)
        sum_bins(work, totals, count, False)


@inline_sums
def sum_mismatch(work, totals, count, near, binned):
    """`near`: a constant; True promises that no log-ratio is clipped or infinite. `binned`: bins give the other sums.

    Registers are scarce: a slot that nothing reads, or a sum that is computed elsewhere, would make it a tenth slower.
    """
    finite, frequent = 0, 0
    sum_l, sum_abs, sum_k3, sum_tv, sum_off, sum_square, sum_rollout = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    rare_p, rare_q, frequent_p, frequent_q, pp, qq, pq = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    tv_max = get(totals, m.TV_MAX)
    for i in range(count):
        train, rollout = get(work, m.TRAIN + i), get(work, m.ROLLOUT + i)
        log_ratio, k3, ratio, off_one, difference, off_certain = of_token(train, rollout, near)
        put(work, m.LOG_RATIO + i, log_ratio)
        put(work, m.K3 + i, k3)
        put(work, m.RATIO + i, ratio)
        put(work, m.DIFFERENCE + i, difference)
        possible = near | (log_ratio >= -1e300)
        sum_rollout += rollout if possible else 0.0
        if not binned:
            finite += possible
            sum_l += log_ratio if possible else 0.0
            sum_k3 += k3 if possible else 0.0
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
    put(work, b + m.FINITE, float(count) if near else float(finite))
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


@inline_sums
def sum_bins(work, totals, count, near):
    """Sums of the tokens of each bin of mu, and of all bins. `near`: a constant; True promises that l is finite.

    It is one pass, with a variable for each sum, because only then do they stay in registers.
    """
    n0, n1, n2, n3, n4 = 0, 0, 0, 0, 0
    f0, f1, f2, f3, f4 = 0, 0, 0, 0, 0
    l0, l1, l2, l3, l4 = 0.0, 0.0, 0.0, 0.0, 0.0
    a0, a1, a2, a3, a4 = 0.0, 0.0, 0.0, 0.0, 0.0
    k0, k1, k2, k3, k4 = 0.0, 0.0, 0.0, 0.0, 0.0
    t0, t1, t2, t3, t4 = 0.0, 0.0, 0.0, 0.0, 0.0
    for i in range(count):
        rollout, log_ratio = get(work, m.ROLLOUT + i), get(work, m.LOG_RATIO + i)
        kl, tv, size = get(work, m.K3 + i), abs(get(work, m.DIFFERENCE + i)), abs(log_ratio)
        from1, from2, from3, from4 = rollout >= _E1, rollout >= _E2, rollout >= _E3, rollout >= _E4
        in0, in1, in2 = rollout < _E1, from1 & (rollout < _E2), from2 & (rollout < _E3)
        in3, in4 = from3 & (rollout < _E4), from4
        n0, n1, n2, n3, n4 = n0 + in0, n1 + in1, n2 + in2, n3 + in3, n4 + in4
        t0, t1, t2 = t0 + (tv if in0 else 0.0), t1 + (tv if in1 else 0.0), t2 + (tv if in2 else 0.0)
        t3, t4 = t3 + (tv if in3 else 0.0), t4 + (tv if in4 else 0.0)
        if not near:
            possible = log_ratio >= -1e300
            in0, in1, in2, in3, in4 = in0 & possible, in1 & possible, in2 & possible, in3 & possible, in4 & possible
            f0, f1, f2, f3, f4 = f0 + in0, f1 + in1, f2 + in2, f3 + in3, f4 + in4
        l0, l1, l2 = (
            l0 + (log_ratio if in0 else 0.0),
            l1 + (log_ratio if in1 else 0.0),
            l2 + (log_ratio if in2 else 0.0),
        )
        l3, l4 = l3 + (log_ratio if in3 else 0.0), l4 + (log_ratio if in4 else 0.0)
        a0, a1, a2 = a0 + (size if in0 else 0.0), a1 + (size if in1 else 0.0), a2 + (size if in2 else 0.0)
        a3, a4 = a3 + (size if in3 else 0.0), a4 + (size if in4 else 0.0)
        k0, k1, k2 = k0 + (kl if in0 else 0.0), k1 + (kl if in1 else 0.0), k2 + (kl if in2 else 0.0)
        k3, k4 = k3 + (kl if in3 else 0.0), k4 + (kl if in4 else 0.0)
    if near:
        f0, f1, f2, f3, f4 = n0, n1, n2, n3, n4
    put(work, m.BLOCK_SUMS + m.FINITE, 0.0)
    add_bin(work, totals, m.PROBABILITY_SUMS, n0, f0, l0, a0, k0, t0)
    add_bin(work, totals, m.PROBABILITY_SUMS + m.BIN_WORDS, n1, f1, l1, a1, k1, t1)
    add_bin(work, totals, m.PROBABILITY_SUMS + 2 * m.BIN_WORDS, n2, f2, l2, a2, k2, t2)
    add_bin(work, totals, m.PROBABILITY_SUMS + 3 * m.BIN_WORDS, n3, f3, l3, a3, k3, t3)
    add_bin(work, totals, m.PROBABILITY_SUMS + 4 * m.BIN_WORDS, n4, f4, l4, a4, k4, t4)


@inline
def add_bin(work, totals, at, n, finite, sum_l, sum_abs, sum_k3, sum_tv):
    """Adds a bin's sums over the block to the bin's totals and, except for the count, to the sums of the block."""
    add(totals, at + m.N, float(n))
    add(totals, at + m.FINITE, float(finite))
    add(totals, at + m.L, sum_l)
    add(totals, at + m.ABS_L, sum_abs)
    add(totals, at + m.K3_SUM, sum_k3)
    add(totals, at + m.TV, sum_tv)
    add(work, m.BLOCK_SUMS + m.FINITE, float(finite))
    add(work, m.BLOCK_SUMS + m.L, sum_l)
    add(work, m.BLOCK_SUMS + m.ABS_L, sum_abs)
    add(work, m.BLOCK_SUMS + m.K3_SUM, sum_k3)
    add(work, m.BLOCK_SUMS + m.TV, sum_tv)


@stage
def histogram(work, totals, settings, first, count):
    """Counts l in the bins of `maths.histogram`, which follow from its bits."""
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
