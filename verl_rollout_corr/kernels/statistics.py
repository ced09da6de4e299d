"""The statistics that a criterion can judge: each is in a slot that is filled anyway, or has a stage that fills one."""

# pyright: basic
from __future__ import annotations

from verl_rollout_corr.kernels import memory as m
from verl_rollout_corr.kernels.exponential import LN2, exp_both, log1p, log_beyond, off_bounded
from verl_rollout_corr.kernels.machine import bits_of, float_of, get, get_int, inline, put
from verl_rollout_corr.kernels.stages import Stage, stage

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
        put(work, m.ABS + i, abs(off_bounded(get(work, m.LOG_RATIO + i), get(work, m.GROWN + i))))


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
    off = exp_both(near)[1]
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
    """The probability and its complement, from a log-prob. A log-prob above 0 counts as certainty."""
    size, off = exp_both(max(min(log, 0.0), -700.0))
    return size, -off


@inline
def divergences(log_ratio: float, k3: float, difference: float, q: float, exact_not_q: float):
    """Both Bernoulli divergences, (p || q) and (q || p), of a token of which nothing was clipped.

    With phi(x) = x e^x - e^x + 1 as in the definition: q phi(-l) r = q k3 and q phi(l) = q (l (r - 1) - k3), and the
    same of the complements, for which one logarithm serves both directions.
    """
    exact_not_p = exact_not_q - difference
    not_p, not_q = max(exact_not_p, _COMPLEMENT_FLOOR), max(exact_not_q, _COMPLEMENT_FLOOR)
    floored = (exact_not_p < not_p) | (exact_not_q < not_q)
    gap = not_p - not_q if floored else -difference
    exponent = (bits_of(not_p) - bits_of(not_q) + (1 << 51)) >> 52
    scaled = not_p * float_of((1023 - exponent) << 52)
    s = (gap if exponent == 0 else scaled - not_q) / (scaled + not_q)
    beyond = log_beyond(s)
    log = exponent * LN2 + (2.0 * s + s * beyond)
    excess = s * (gap - not_q * beyond) if exponent == 0 else gap - not_q * log
    added = gap + difference if floored else 0.0
    taken = q * k3
    return (q * (log_ratio * (log_ratio + k3)) - taken) + (gap * log - excess) + added, taken + excess - added


@inline
def plain(work, count):
    """Whether no log-prob of the block is clipped, infinite or above 0."""
    above = False
    for i in range(count):
        above |= (get(work, m.TRAIN + i) > 0.0) | (get(work, m.ROLLOUT + i) > 0.0)
    return (not above) & (get_int(work, m.FAR) == 0)


@inline
def block_divergences(work, i):
    """Both divergences of a token of the block."""
    q, off_certain = exp_both(get(work, m.ROLLOUT + i))
    log_ratio, k3, difference = get(work, m.LOG_RATIO + i), get(work, m.K3 + i), get(work, m.DIFFERENCE + i)
    return divergences(log_ratio, k3, difference, q, -off_certain)


@stage
def bkl(work, totals, settings, first, count):
    """The larger of the Bernoulli divergences of both directions."""
    if plain(work, count):
        for i in range(count):
            forward, backward = block_divergences(work, i)
            put(work, m.BKL + i, max(forward, backward))
        return
    for i in range(count):
        train, rollout = min(get(work, m.TRAIN + i), 0.0), min(get(work, m.ROLLOUT + i), 0.0)
        p, not_p = certain(train)
        q, not_q = certain(rollout)
        forward = bernoulli_kl(train - rollout, p, q, not_p, not_q)
        put(work, m.BKL + i, max(forward, bernoulli_kl(rollout - train, q, p, not_q, not_p)))


@stage
def bkl_mu(work, totals, settings, first, count):
    """The Bernoulli divergence from mu to pi_train."""
    if plain(work, count):
        for i in range(count):
            put(work, m.BKL_MU + i, block_divergences(work, i)[1])
        return
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
"""The slot of each statistic, and the stage that fills it. A statistic that is not listed is left to the definition."""
