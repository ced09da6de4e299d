"""The exponential as a polynomial that vectorises, in parts from which e^x - 1 follows without cancellation."""

# pyright: basic
from __future__ import annotations

import math

from verl_rollout_corr.kernels.machine import bits_of, float_of, fused, inline

# (e^f - 1 - f) / f^2 for |f| <= ln(2) / 2, interpolated at Chebyshev nodes: relative error below 2e-14. It has to be so
# small for pi_train - 1 = (mu - 1) + mu (e^l - 1), which cancels where the trainer is certain.
_C0, _C1, _C2, _C3 = 0.5, 0.1666666666664829, 0.04166666666665136, 0.008333333353729397
_C4, _C5, _C6 = 0.0013888888905881542, 0.00019841208732536384, 2.4801536388690766e-05
_C7, _C8 = 2.762511557828763e-06, 2.761380686153829e-07
_LOG2_E, LN2 = 1 / math.log(2), math.log(2)
"""The logarithm of 2."""
_ROUND = 1.5 * 2.0**52 + 1023
"""A number next to it has no fraction: adding it rounds, and leaves the integer and the exponents' bias in its bits."""

_LOW, _HIGH = math.exp(-20.0), math.exp(20.0)
_OFF_LOW, _OFF_HIGH = math.expm1(-20.0), math.expm1(20.0)


@inline
def exp_parts(x: float):
    """s, f, f^2, g with e^x = s (1 + f + f^2 g), s a power of two; for |x| < ln(2)/2, s = 1 and f = x.

    For x in [-700, 700]. What a token needs are mostly products, and a processor has units for sums beside those for
    products: so there is no product here that could be a sum.
    """
    shifted = fused(x, _LOG2_E, _ROUND)
    f = fused(shifted - _ROUND, -LN2, x)
    s = float_of(bits_of(shifted) << 52)
    f2 = f * f
    even = fused(f2, fused(f2, fused(f2, fused(f2, _C8, _C6), _C4), _C2), _C0)
    odd = fused(f2, fused(f2, fused(f2, _C7, _C5), _C3), _C1)
    return s, f, f2, fused(f, odd, even)


@inline
def exp_both(x: float):
    """e^x and e^x - 1, both accurate. For x in [-700, 700]."""
    s, f, f2, g = exp_parts(x)
    grown = fused(f2, g, f)
    return fused(s, grown, s), fused(s, grown, s - 1.0)


@inline
def ratio(x: float) -> float:
    """exp(clip(x, -20, 20)), and exactly 0 for -inf."""
    return 0.0 if x < -1e300 else exp_both(min(max(x, -20.0), 20.0))[0]


@inline
def off_bounded(log_ratio: float, off_one: float) -> float:
    """The clipped r minus 1, from e^l - 1."""
    return min(max(off_one, _OFF_LOW), _OFF_HIGH) if log_ratio >= -1e300 else -1.0


@inline
def of_log_ratio(train: float, rollout: float, near: bool):
    """l, k3, r, r - 1 and e^l - 1, of valid log-probs; `maths.statistics` says what they mean.

    `near`: a constant; True promises |l| <= 20, where nothing is clipped.
    """
    log_ratio = train - rollout
    s, f, f2, g = exp_parts(log_ratio if near else max(log_ratio, -700.0))  # at most 100.001: log mu is at least -100
    bend = f2 * g
    grown = f + bend
    off_one = fused(s, grown, s - 1.0)
    k3 = bend if s == 1.0 else off_one - log_ratio
    if near:
        return log_ratio, k3, fused(s, grown, s), off_one, off_one
    possible = log_ratio >= -1e300
    bounded = off_bounded(log_ratio, off_one)
    k3 = k3 if abs(log_ratio) <= 20.0 else bounded - log_ratio
    size = min(max(fused(s, grown, s), _LOW), _HIGH)
    return log_ratio, k3, size if possible else 0.0, bounded, off_one if possible else -1.0


# log((1 + s) / (1 - s)) / s - 2, in powers of s^2, for |s| <= 0.21
_A1, _A2, _A3, _A4, _A5, _A6, _A7, _A8, _A9, _A10 = (2.0 / (2 * k + 1) for k in range(1, 11))


@inline
def log_beyond(s: float) -> float:
    """The b of log((1 + s) / (1 - s)) = s (2 + b), for |s| <= 0.21."""
    s2 = s * s
    high = _A6 + s2 * (_A7 + s2 * (_A8 + s2 * (_A9 + s2 * _A10)))
    return s2 * (_A1 + s2 * (_A2 + s2 * (_A3 + s2 * (_A4 + s2 * (_A5 + s2 * high)))))


@inline
def log1p(x: float) -> float:
    """log(1 + x) for x > -1, accurate for small x too; some finite number for x = -1."""
    y = 1.0 + x
    # The power of two that brings y between sqrt(1/2) and sqrt(2).
    exponent = (bits_of(y * math.sqrt(2.0)) >> 52) - 1023
    scale = float_of((1023 - exponent) << 52)
    off = x if exponent == 0 else y * scale - 1.0
    s = off / (2.0 + off)
    return exponent * LN2 + (2.0 * s + s * log_beyond(s))
