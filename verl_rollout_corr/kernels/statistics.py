"""The statistics of the grammar that a criterion can judge: slots that hold them already, or a stage that fills one."""

# pyright: basic
from __future__ import annotations

from verl_rollout_corr.kernels import memory as m
from verl_rollout_corr.kernels.exponential import exp_parts, log1p
from verl_rollout_corr.kernels.machine import Stage, get, inline, put, stage

_COMPLEMENT_FLOOR = 2.0**-24


@stage
def k2(work, totals, settings, first, count):
    """l^2 / 2."""
    for i in range(count):
        log_ratio = get(work, m.LOG_RATIO + i)
        put(work, m.K2 + i, 0.5 * log_ratio * log_ratio)


@stage
def absolute(work, totals, settings, first, count):
    """|r - 1|."""
    for i in range(count):
        put(work, m.ABS + i, abs(get(work, m.OFF_ONE + i)))


@stage
def tv(work, totals, settings, first, count):
    """|pi_train - mu|."""
    for i in range(count):
        put(work, m.TV_STAT + i, abs(get(work, m.DIFFERENCE + i)))


@inline
def phi(log: float, off: float) -> float:
    """Log e^log - e^log + 1, with off = e^log - 1; by its series where that would cancel."""
    high = 1 / 30 + log * (1 / 144 + log * (1 / 840))
    series = log * log * (0.5 + log * (1 / 3 + log * (1 / 8 + log * high)))
    return series if abs(log) < 1e-2 else log * (1.0 + off) - off


@inline
def bernoulli_kl(log_ratio: float, p: float, q: float, exact_not_p: float, exact_not_q: float) -> float:
    """`maths.statistics._bernoulli_kl` from log p - log q, the probabilities and their complements."""
    far = log_ratio > 1.0
    near = max(min(log_ratio, 1.0), -700.0)
    s, f, g = exp_parts(near)
    off = (s - 1.0) + s * (f + g)
    moved = q - p if far else -q * off
    taken = (p * log_ratio - p) + q if far else q * phi(near, off)
    not_p, not_q = max(exact_not_p, _COMPLEMENT_FLOOR), max(exact_not_q, _COMPLEMENT_FLOOR)
    floored = (exact_not_p < not_p) | (exact_not_q < not_q)
    moved_complement = not_p - not_q if floored else moved
    share = max(moved_complement / not_q, -1.0)
    left = not_q * (1.0 if share <= -1.0 else phi(log1p(share), share))
    return (taken + left) + (moved_complement - moved if floored else 0.0)


@inline
def certain(log: float):
    """The probability and its complement, of a log-prob; above 0 it is certainty."""
    s, f, g = exp_parts(max(min(log, 0.0), -700.0))
    off = (s - 1.0) + s * (f + g)
    return s + s * (f + g), -off


@stage
def bkl(work, totals, settings, first, count):
    """The larger of the Bernoulli divergences of both directions."""
    for i in range(count):
        train, rollout = min(get(work, m.TRAIN + i), 0.0), min(get(work, m.ROLLOUT + i), 0.0)
        p, not_p = certain(train)
        q, not_q = certain(rollout)
        forward = bernoulli_kl(train - rollout, p, q, not_p, not_q)
        put(work, m.BKL + i, max(forward, bernoulli_kl(rollout - train, q, p, not_q, not_p)))


@stage
def bkl_mu(work, totals, settings, first, count):
    """The Bernoulli divergence from mu to pi_train."""
    for i in range(count):
        train, rollout = min(get(work, m.TRAIN + i), 0.0), min(get(work, m.ROLLOUT + i), 0.0)
        p, not_p = certain(train)
        q, not_q = certain(rollout)
        put(work, m.BKL_MU + i, bernoulli_kl(rollout - train, q, p, not_q, not_p))


SLOTS: dict[str, tuple[int, Stage | None]] = {
    "k1": (m.LOG_RATIO, None),
    "k2": (m.K2, k2),
    "k3": (m.K3, None),
    "abs": (m.ABS, absolute),
    "tv": (m.TV_STAT, tv),
    "bkl": (m.BKL, bkl),
    "bkl_mu": (m.BKL_MU, bkl_mu),
}
"""Where each statistic stands, and the stage that puts it there. A word of the grammar that is not here is left to the
definition."""
