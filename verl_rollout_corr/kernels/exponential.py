"""The exponential as a polynomial that vectorises, in parts from which e^x - 1 follows without cancellation."""

# pyright: basic
from __future__ import annotations

import math

from verl_rollout_corr.kernels.machine import bits_of, float_of, inline

# (e^f - 1 - f) / f^2 for |f| <= ln(2) / 2, interpolated at Chebyshev nodes: relative error below 3e-16.
_C0, _C1, _C2, _C3, _C4 = (
    0.5000000000000001,
    0.16666666666666669,
    0.04166666666662348,
    0.008333333333330011,
    0.0013888888917538296,
)
_C5, _C6, _C7, _C8, _C9 = (
    0.00019841269863303223,
    2.4801520792572694e-05,
    2.75572680728901e-06,
    2.762032742826824e-07,
    2.5100569275813683e-08,
)
_LOG2_E = 1 / math.log(2)
_LN2_HIGH, _LN2_LOW = 0.6931471803691238, 1.9082149292705877e-10  # the first has 32 zero bits at its end
_ROUND = 1.5 * 2.0**52  # a number next to it has no fraction: adding it rounds, and leaves the integer in the last bits

_LOW, _HIGH = math.exp(-20.0), math.exp(20.0)
_OFF_LOW, _OFF_HIGH = math.expm1(-20.0), math.expm1(20.0)


@inline
def exp_parts(x: float):
    """s, f, g with e^x = s (1 + f + g) and s a power of two; for |x| < ln(2)/2, s = 1, f = x and g = e^x - 1 - x.

    For x in [-700, 700].
    """
    shifted = x * _LOG2_E + _ROUND
    whole = shifted - _ROUND
    f = (x - whole * _LN2_HIGH) - whole * _LN2_LOW
    s = float_of((bits_of(shifted) + 1023) << 52)
    f2 = f * f
    f4 = f2 * f2
    low = (_C0 + _C1 * f) + (_C2 + _C3 * f) * f2
    high = (_C4 + _C5 * f) + (_C6 + _C7 * f) * f2
    g = f2 * (low + (high + (_C8 + _C9 * f) * f4) * f4)
    return s, f, g


@inline
def ratio(x: float) -> float:
    """exp(clip(x, -20, 20)), and exactly 0 for -inf."""
    s, f, g = exp_parts(min(max(x, -20.0), 20.0))
    return 0.0 if x < -1e300 else s + s * (f + g)


@inline
def of_token(train: float, rollout: float, near: bool):
    """l, k3, r, r - 1, pi_train - mu and mu - 1, of valid log-probs; `maths.statistics` says what they mean.

    `near`: a constant; True promises |l| <= 20, where nothing is clipped. pi_train - mu is computed as mu (e^l - 1),
    which does not cancel, unlike a difference of two exponentials.
    """
    log_ratio = train - rollout
    s, f, g = exp_parts(log_ratio if near else max(log_ratio, -700.0))  # at most 100.001: log mu is at least -100
    grown = s * (f + g)
    size, off_one = s + grown, (s - 1.0) + grown
    # With s = 1 and f = l the bracket is exactly 0.
    k3 = s * g + ((s * f + (s - 1.0)) - log_ratio)
    s, f, g = exp_parts(rollout)
    grown = s * (f + g)
    probability, off_certain = s + grown, (s - 1.0) + grown
    if near:
        return log_ratio, k3, size, off_one, probability * off_one, off_certain
    possible = log_ratio >= -1e300
    ratio_ = min(max(size, _LOW), _HIGH) if possible else 0.0
    bounded = min(max(off_one, _OFF_LOW), _OFF_HIGH) if possible else -1.0
    k3 = k3 if abs(log_ratio) <= 20.0 else bounded - log_ratio
    return log_ratio, k3, ratio_, bounded, probability * (off_one if possible else -1.0), off_certain


# log((1 + s) / (1 - s)) / s - 2, in powers of s^2, for |s| <= 0.21
_A1, _A2, _A3, _A4, _A5, _A6, _A7, _A8, _A9, _A10 = (2.0 / (2 * k + 1) for k in range(1, 11))
LN2 = math.log(2)
"""The logarithm of 2."""


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
