"""The bins: by the probability of a token, by its position in the row, by the staleness of the row."""

# pyright: basic
from __future__ import annotations

import math

from verl_rollout_corr.kernels import memory as m
from verl_rollout_corr.kernels.machine import add, get, inline, inline_sums, put
from verl_rollout_corr.kernels.stages import sums
from verl_rollout_corr.maths.bins import POSITION, PROBABILITY, STALENESS


def reached_from(edge: float) -> float:
    """The smallest float64 x with exp(x) >= edge: comparing x with it equals comparing exp(x) with the edge."""
    x = math.log(edge)
    while math.exp(x) >= edge:
        x = math.nextafter(x, -math.inf)
    while math.exp(x) < edge:
        x = math.nextafter(x, math.inf)
    return x


FREQUENT = reached_from(0.5)
"""The log-prob from which on a token is frequent: an edge of the bins."""

assert PROBABILITY.edges[2] == 0.5

_E1, _E2, _E3, _E4 = (reached_from(edge) for edge in PROBABILITY.edges)
_P1, _P2, _P3, _P4, _P5, _P6 = POSITION.edges
_G0, _G1, _G2, _G3, _G4, _G5 = STALENESS.edges
_FAR = 1 << 62


@inline
def position_bin(position):
    """The bin of a position."""
    reached = (position >= _P1) + (position >= _P2) + (position >= _P3)
    return reached + (position >= _P4) + (position >= _P5) + (position >= _P6)


@inline
def next_edge(position):
    """The first edge of the bins above a position."""
    if position < _P3:
        return _P1 if position < _P1 else _P2 if position < _P2 else _P3
    return _P4 if position < _P4 else _P5 if position < _P5 else _P6 if position < _P6 else _FAR


@inline
def staleness_bin(lag):
    """The bin of a lag."""
    reached = (lag >= _G0) + (lag >= _G1) + (lag >= _G2)
    return reached + (lag >= _G3) + (lag >= _G4) + (lag >= _G5)


@sums
def sum_positions(work, totals, settings, first, count):
    """Adds a block whose first token has the position `first` to several bins, each with its part of the block."""
    start = 0
    while start < count:
        end = min(count, next_edge(first + start) - first)
        finite, sum_l, sum_abs, sum_k3, sum_tv = 0, 0.0, 0.0, 0.0, 0.0
        for i in range(start, end):
            log_ratio = get(work, m.LOG_RATIO + i)
            possible = log_ratio >= -1e300
            finite += possible
            sum_l += log_ratio if possible else 0.0
            sum_abs += abs(log_ratio) if possible else 0.0
            sum_k3 += get(work, m.K3 + i) if possible else 0.0
            sum_tv += abs(get(work, m.DIFFERENCE + i))
        at = m.POSITION_SUMS + position_bin(first + start) * m.BIN_WORDS
        add_to_bin(totals, at, end - start, finite, sum_l, sum_abs, sum_k3, sum_tv)
        start = end


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
    add(totals, m.MOMENTS, float(n3 + n4))  # mu >= 0.5 is where these bins begin
    put(work, m.BLOCK_SUMS + m.FINITE, 0.0)
    put(work, m.BLOCK_SUMS + m.ABS_L, 0.0)
    add_bin(work, totals, m.PROBABILITY_SUMS, n0, f0, l0, a0, k0, t0)
    add_bin(work, totals, m.PROBABILITY_SUMS + m.BIN_WORDS, n1, f1, l1, a1, k1, t1)
    add_bin(work, totals, m.PROBABILITY_SUMS + 2 * m.BIN_WORDS, n2, f2, l2, a2, k2, t2)
    add_bin(work, totals, m.PROBABILITY_SUMS + 3 * m.BIN_WORDS, n3, f3, l3, a3, k3, t3)
    add_bin(work, totals, m.PROBABILITY_SUMS + 4 * m.BIN_WORDS, n4, f4, l4, a4, k4, t4)


@inline
def add_bin(work, totals, at, n, finite, sum_l, sum_abs, sum_k3, sum_tv):
    """Adds a bin's sums over the block to the bin's totals and, except for the count, to the sums of the block."""
    add_to_bin(totals, at, n, finite, sum_l, sum_abs, sum_k3, sum_tv)
    add(work, m.BLOCK_SUMS + m.FINITE, float(finite))
    add(work, m.BLOCK_SUMS + m.L, sum_l)
    add(work, m.BLOCK_SUMS + m.ABS_L, sum_abs)
    add(work, m.BLOCK_SUMS + m.K3_SUM, sum_k3)
    add(work, m.BLOCK_SUMS + m.TV, sum_tv)


@inline
def add_to_bin(totals, at, n, finite, sum_l, sum_abs, sum_k3, sum_tv):
    """Adds sums over tokens to a bin's totals."""
    add(totals, at + m.N, float(n))
    add(totals, at + m.FINITE, float(finite))
    add(totals, at + m.L, sum_l)
    add(totals, at + m.ABS_L, sum_abs)
    add(totals, at + m.K3_SUM, sum_k3)
    add(totals, at + m.TV, sum_tv)
