"""The statistics of tokens on a GPU, as `maths.statistics` defines them."""

# Triton's type hints describe a kernel's arguments as they are inside it, not as they are passed.
# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from verl_rollout_corr.maths.log_ratio import EXPONENT_LIMIT
from verl_rollout_corr.maths.statistics import _COMPLEMENT_FLOOR

LIMIT = tl.constexpr(EXPONENT_LIMIT)
"""The largest exponent."""
LOWEST = tl.constexpr(-1e300)
"""A log-prob below it is -inf."""
_FLOOR = tl.constexpr(_COMPLEMENT_FLOOR)
_NEAR = tl.constexpr(0.35)


@triton.jit
def series(x):
    """e^x - 1 - x for |x| <= 0.35: Taylor's series, whose first missing term is below 5e-18 of it."""
    value = x * 0.0 + 1.0
    for i in tl.static_range(11):
        value = 1.0 + x * value * (1.0 / (13 - i))
    return 0.5 * x * x * value


@triton.jit
def growth(x):
    """e^x - 1 and e^x - 1 - x, neither losing a small x; for x in [-745, 700]."""
    near = tl.abs(x) <= _NEAR
    small = series(tl.where(near, x, 0.0))
    off = tl.exp(x) - 1.0
    return tl.where(near, x + small, off), tl.where(near, small, off - x)


@triton.jit
def ratio_of(x):
    """exp(clip(x, -20, 20)); 0 for -inf."""
    return tl.where(x < LOWEST, 0.0, tl.exp(tl.minimum(tl.maximum(x, -LIMIT), LIMIT)))


@triton.jit
def k3_of(log_ratio):
    """The statistic r - 1 - l."""
    _, near = growth(tl.minimum(tl.maximum(log_ratio, -LIMIT), LIMIT))
    clipped = tl.minimum(tl.maximum(log_ratio, -LIMIT), LIMIT)
    # Beyond the limit the linear term goes on, and the exponential does not.
    value = near + (clipped - tl.minimum(log_ratio, 1e8))
    return tl.where(log_ratio < LOWEST, float("inf"), tl.maximum(value, 0.0))


@triton.jit
def absolute(log_ratio):
    """The statistic |r - 1|."""
    off, _ = growth(tl.minimum(tl.maximum(log_ratio, -LIMIT), LIMIT))
    return tl.where(log_ratio < LOWEST, 1.0, tl.abs(off))


@triton.jit
def log1p(x):
    """log(1 + x) for x > -1: from 2 artanh(x / (2 + x)) for a small x."""
    near = tl.abs(x) <= _NEAR
    small = tl.where(near, x, 0.0)
    half = small / (2.0 + small)
    square = half * half
    value = square * 0.0 + 1.0 / 25
    for i in tl.static_range(12):
        value = 1.0 / (23 - 2 * i) + square * value
    return tl.where(near, 2.0 * half * value, tl.log(tl.maximum(1.0 + tl.where(near, 0.0, x), 1e-300)))


@triton.jit
def weighted_phi(weight, log):
    """Phi(x) = x e^x - e^x + 1 times the weight; phi(-inf) = 1."""
    bounded = tl.maximum(log, -700.0)
    off, rest = growth(bounded)
    near = tl.abs(bounded) <= _NEAR
    phi = tl.where(near, bounded * off - rest, bounded * (1.0 + off) - off)
    phi = tl.where(log < LOWEST, 1.0, phi)
    return tl.where(weight == 0.0, 0.0, weight * phi)


@triton.jit
def bernoulli_kl(log_p, log_q):
    """`maths.statistics._bernoulli_kl`."""
    impossible = (log_q < LOWEST) & (log_p > LOWEST)
    log_p, log_q = tl.maximum(log_p, -745.0), tl.maximum(log_q, -745.0)
    log_ratio = log_p - log_q
    off_p, _ = growth(log_p)
    off_q, _ = growth(log_q)
    p, q = tl.exp(log_p), tl.exp(log_q)
    not_p, not_q = tl.maximum(-off_p, _FLOOR), tl.maximum(-off_q, _FLOOR)
    far = log_ratio > 1.0
    near = tl.minimum(log_ratio, 1.0)
    off, _ = growth(tl.maximum(near, -745.0))
    moved = tl.where(far, q - p, -q * off)
    taken = tl.where(far, p * log_ratio - p + q, weighted_phi(q, near))
    floored = (-off_p < not_p) | (-off_q < not_q)
    moved_complement = tl.where(floored, not_p - not_q, moved)
    share = tl.maximum(moved_complement / not_q, -1.0)
    log = tl.where(share <= -1.0, float("-inf"), log1p(tl.maximum(share, -1.0 + 1e-16)))
    divergence = taken + weighted_phi(not_q, log) + tl.where(floored, moved_complement - moved, 0.0)
    return tl.where(impossible, float("inf"), divergence)


@triton.jit
def statistic(code, train, rollout, log_ratio):
    """The statistic of each token; a new one is a branch here and a code in STATS."""
    value = log_ratio
    if code == 1:
        value = 0.5 * log_ratio * log_ratio
    if code == 2:
        value = k3_of(log_ratio)
    if code == 3:
        value = absolute(log_ratio)
    if code == 4:
        value = tl.abs(tl.exp(train) - tl.exp(rollout))
    if code >= 5:
        p, q = tl.minimum(train, 0.0), tl.minimum(rollout, 0.0)
        backward = bernoulli_kl(q, p)
        value = backward
        if code == 5:
            value = tl.maximum(bernoulli_kl(p, q), backward)
    return value
