"""Stages that look at every token of a block, whatever the configuration: check, log-ratios and ratios, histogram."""

# pyright: basic
from __future__ import annotations

from verl_rollout_corr.kernels import memory as m
from verl_rollout_corr.kernels.exponential import of_log_ratio
from verl_rollout_corr.kernels.machine import (
    add,
    bits_of,
    bump,
    get,
    get_int,
    get_int32,
    inline,
    inline_sums,
    put,
    put_int,
    put_int32,
)
from verl_rollout_corr.kernels.stages import stage, sums
from verl_rollout_corr.maths.collection import SUSPICIOUS_LOG_PROB
from verl_rollout_corr.maths.histogram import _FIRST, _SHIFT, CENTRE, COUNT, SIDE
from verl_rollout_corr.maths.inputs import LEAST_ROLLOUT_LOG_PROB, LOG_PROB_SLACK

_NEAR = -19.9
"""Log-probs from here up to 1e-3 have a log-ratio that is not clipped."""


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


@stage
def log_ratios(work, totals, settings, first, count):
    """The log-ratio of each token alone."""
    for i in range(count):
        put(work, m.LOG_RATIO + i, get(work, m.TRAIN + i) - get(work, m.ROLLOUT + i))


@inline_sums
def sum_ratios(work, count, near, binned, wanted):
    """l, k3 and e^l - 1 of each token, and their sums over the block; r too if it is `wanted`.

    All three are constants. `near` promises that no log-ratio is clipped or infinite. `binned`: the sums of l and k3
    follow from those of the bins. Registers are scarce: a slot that nothing reads, or a sum that is computed elsewhere,
    would make this slower, and so would looking at the probabilities in the same loop.
    """
    finite, sum_l, sum_k3, sum_off, sum_square, sum_rollout = 0, 0.0, 0.0, 0.0, 0.0, 0.0
    for i in range(count):
        rollout = get(work, m.ROLLOUT + i)
        log_ratio, k3, ratio, off_one, grown = of_log_ratio(get(work, m.TRAIN + i), rollout, near)
        put(work, m.LOG_RATIO + i, log_ratio)
        put(work, m.K3 + i, k3)
        put(work, m.GROWN + i, grown)
        if wanted:
            put(work, m.RATIO + i, ratio)
        possible = near | (log_ratio >= -1e300)
        sum_rollout += rollout if possible else 0.0
        if not binned:
            finite += possible
            sum_l += log_ratio if possible else 0.0
            sum_k3 += k3 if possible else 0.0
        sum_off += abs(off_one)
        # r is 1 + (r - 1) where nothing reads it alone: one product less.
        size = ratio if wanted else off_one + 1.0
        sum_square += size * size
    b = m.BLOCK_SUMS
    put(work, b + m.N, float(count))
    put(work, b + m.FINITE, float(count) if near else float(finite))
    put(work, b + m.L, sum_l)
    put(work, b + m.K3_SUM, sum_k3)
    put(work, b + m.OFF_ONE_SUM, sum_off)
    put(work, b + m.SQUARE, sum_square)
    put(work, b + m.ROLLOUT_SUM, sum_rollout)


@sums
def ratios(work, totals, settings, first, count):
    """l, k3 and r - 1, and their sums."""
    if get_int(work, m.FAR) == 0:
        sum_ratios(work, count, True, False, False)
    else:
        sum_ratios(work, count, False, False, False)


@sums
def ratios_kept(work, totals, settings, first, count):
    """The same, and r."""
    if get_int(work, m.FAR) == 0:
        sum_ratios(work, count, True, False, True)
    else:
        sum_ratios(work, count, False, False, True)


@sums
def ratios_in_bins(work, totals, settings, first, count):
    """l, k3, r - 1, and the sums that do not follow from those of the bins."""
    if get_int(work, m.FAR) == 0:
        sum_ratios(work, count, True, True, False)
    else:
        sum_ratios(work, count, False, True, False)


@sums
def ratios_in_bins_kept(work, totals, settings, first, count):
    """The same, and r."""
    if get_int(work, m.FAR) == 0:
        sum_ratios(work, count, True, True, True)
    else:
        sum_ratios(work, count, False, True, True)


RATIOS = {
    (False, False): ratios,
    (False, True): ratios_kept,
    (True, False): ratios_in_bins,
    (True, True): ratios_in_bins_kept,
}
"""The stage of the ratios: whether there are bins, and whether something reads r."""


@stage
def histogram(work, totals, settings, first, count):
    """Counts l in the bins of `maths.histogram`, which follow from its bits.

    Tokens are counted in two tables in turn, so that two of the same bin need not wait for each other.
    """
    if get_int(work, m.FAR) == 0:
        find_places(work, count, True)
    else:
        find_places(work, count, False)
    places = work + 8 * m.SCRATCH
    for i in range(0, count - 1, 2):
        bump(totals, get_int32(places, i), 1)
        bump(totals, get_int32(places, i + 1) + COUNT, 1)
    if (count & 1) != 0:
        bump(totals, get_int32(places, count - 1), 1)


@inline
def find_places(work, count, near):
    """Writes where each token is counted, as int32. `near`: a constant; True promises that l is finite."""
    places = work + 8 * m.SCRATCH
    for i in range(count):
        log_ratio = get(work, m.LOG_RATIO + i)
        reached = min(max((bits_of(abs(log_ratio)) >> _SHIFT) - (_FIRST - 1), 0), SIDE + 1)
        index = CENTRE - reached if log_ratio < 0 else CENTRE + reached
        put_int32(places, i, m.HISTOGRAM + (index if near | (log_ratio >= -1e300) else 0))
