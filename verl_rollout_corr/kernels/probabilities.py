"""Stages of the probabilities of a block: pi_train - mu, and the moments of both."""

# pyright: basic
from __future__ import annotations

from verl_rollout_corr.kernels import memory as m
from verl_rollout_corr.kernels.bins import FREQUENT, sum_bins
from verl_rollout_corr.kernels.exponential import exp_both
from verl_rollout_corr.kernels.machine import add, get, get_int, inline_sums, larger, put
from verl_rollout_corr.kernels.stages import sums


@sums
def probabilities(work, totals, settings, first, count):
    """pi_train - mu of each token, and the moments of both."""
    sum_probabilities(work, totals, count, False)


@sums
def probabilities_in_bins(work, totals, settings, first, count):
    """The same, and the sums of each bin of mu, from which those of the block follow."""
    sum_probabilities(work, totals, count, True)
    if get_int(work, m.FAR) == 0:
        sum_bins(work, totals, count, True)
    else:
        sum_bins(work, totals, count, False)


PROBABILITIES = {False: probabilities, True: probabilities_in_bins}
"""The stage of the probabilities: whether there are bins."""


@inline_sums
def sum_probabilities(work, totals, count, binned):
    """pi_train - mu, computed as mu (e^l - 1), which does not cancel; moments about 0 or 1, as `maths.sum_table` says.

    `binned`: a constant; bins give the sum of |pi_train - mu| and the number of frequent tokens.
    """
    frequent, sum_tv, tv_max = 0, 0.0, get(totals, m.TV_MAX)
    rare_p, rare_q, frequent_p, frequent_q, pp, qq, pq = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for i in range(count):
        rollout = get(work, m.ROLLOUT + i)
        mu, off_certain = exp_both(rollout)
        difference = mu * get(work, m.GROWN + i)
        put(work, m.DIFFERENCE + i, difference)
        if not binned:
            sum_tv += abs(difference)
        tv_max = larger(tv_max, abs(difference))
        often = rollout >= FREQUENT
        if not binned:
            frequent += often
        q = off_certain if often else mu
        p = q + difference
        frequent_p += p if often else 0.0
        frequent_q += q if often else 0.0
        rare_p += 0.0 if often else p
        rare_q += 0.0 if often else q
        pp += p * p
        qq += q * q
        pq += p * q
    put(totals, m.TV_MAX, tv_max)
    put(work, m.BLOCK_SUMS + m.TV, sum_tv)
    add(totals, m.MOMENTS, float(frequent))
    add(totals, m.MOMENTS + 1, rare_p)
    add(totals, m.MOMENTS + 2, rare_q)
    add(totals, m.MOMENTS + 3, frequent_p)
    add(totals, m.MOMENTS + 4, frequent_q)
    add(totals, m.MOMENTS + 5, pp)
    add(totals, m.MOMENTS + 6, qq)
    add(totals, m.MOMENTS + 7, pq)
