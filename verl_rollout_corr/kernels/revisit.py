"""Stages that run after all rows: buckets and cuts of a second pass over the tokens; means and weights of a buffer."""

# pyright: basic
from __future__ import annotations

from verl_rollout_corr.kernels import memory as m
from verl_rollout_corr.kernels.answers import next_run, row_address, settings_of
from verl_rollout_corr.kernels.judging import may_leave
from verl_rollout_corr.kernels.machine import (
    add,
    bits_of,
    bump,
    call,
    get,
    get_int,
    get_int8,
    inline,
    put,
    put_float32,
    put_int,
)
from verl_rollout_corr.kernels.stages import stage
from verl_rollout_corr.kernels.weighing import add_weight

_SIDE = 1024
BUCKETS = 2 * _SIDE
"""Sixteen to an octave of |value|, from 2^-40 to 2^24, on both sides of 0; beyond them the outermost."""
_SHIFT, _FIRST = 48, (1023 - 40) << 4

# What the stages of a buffer share. `N`: tokens of valid rows.
R_JOB, R_BUFFER, R_N, R_UNIT, R_MEAN, R_UPPER, R_OUT = range(7)
REVISIT_WORDS = 7
"""Words of that job."""
PER_TOKEN, PER_TURN, PER_ROW = range(3)


@inline
def bucket_of(value):
    """The bucket of a value. It never decreases as the value grows."""
    reached = (bits_of(abs(value)) >> _SHIFT) - _FIRST
    reached = min(max(reached, 0), _SIDE - 1)
    return _SIDE - 1 - reached if value < 0.0 else _SIDE + reached


@stage
def fill_buckets(work, totals, settings, first, count):
    """Counts and sums of the values of tokens that may leave, by bucket; those of all others have one behind them.

    Behind S_OUT are BUCKETS + 1 pairs of counts, then of sums. The two of a pair are used in turn, so that two values
    of the same bucket need not wait for each other.
    """
    slot, may_slot, out = get_int(settings, m.S_SLOT), get_int(settings, m.S_MAY), get_int(settings, m.S_OUT)
    for i in range(count):
        bucket = bucket_of(get(work, slot + i)) if may_leave(work, slot, may_slot, i) else BUCKETS
        put_int(work, m.SCRATCH + i, out + 2 * bucket + (i & 1))
    for i in range(count):
        place = get_int(work, m.SCRATCH + i)
        bump(totals, place, 1)
        add(totals, place + 2 * (BUCKETS + 1), get(work, slot + i))


@stage
def collect_bucket(work, totals, settings, first, count):
    """The values of the bucket S_COUNT, or of all (-1), in order. Behind S_OUT: where to write them, and how many."""
    slot, may_slot, out = get_int(settings, m.S_SLOT), get_int(settings, m.S_MAY), get_int(settings, m.S_OUT)
    address, found, wanted = get_int(totals, out), get_int(totals, out + 1), get_int(settings, m.S_COUNT)
    for i in range(count):
        wants = (wanted < 0) | (bucket_of(get(work, slot + i)) == wanted)
        put_int(work, m.SCRATCH + i, 1 if may_leave(work, slot, may_slot, i) & wants else 0)
    some = 0
    for i in range(count):  # without a branch: a value that is not wanted is overwritten by the next
        put(work, m.PREFIX + some, get(work, slot + i))
        some += get_int(work, m.SCRATCH + i)
    for i in range(some):
        put(address, found + i, get(work, m.PREFIX + i))
    put_int(totals, out + 1, found + some)


@stage
def mark_cut(work, totals, settings, first, count):
    """Clears KEEP where values are above S_UPPER. Behind S_OUT: ties that leave, tokens that left, touched rows."""
    slot, may_slot, out = get_int(settings, m.S_SLOT), get_int(settings, m.S_MAY), get_int(settings, m.S_OUT)
    cut, leaving = get(settings, m.S_UPPER), 0
    for i in range(count):
        leaves = (get(work, slot + i) > cut) & (get_int(work, may_slot + i) != 0)
        put_int(work, m.KEEP + i, 0 if leaves else 1)
        leaving += leaves
    if get_int(totals, out) > 0:
        for i in range(count):
            if (get(work, slot + i) == cut) & may_leave(work, slot, may_slot, i) & (get_int(totals, out) > 0):
                bump(totals, out, -1)
                put_int(work, m.KEEP + i, 0)
                leaving += 1
    put_int(work, m.LEAVING, leaving)
    bump(totals, out + 1, leaving)
    put_int(settings, m.ROW_FAILED, get_int(settings, m.ROW_FAILED) | (leaving > 0))


@stage
def end_cut(work, totals, job, row, length):
    """The end of a row of which tokens may have left."""
    bump(get_int(job, m.J_ROW_KEPT), row, -get_int(work, m.LOST))
    for index in range(get_int(job, m.J_STAGE_COUNT)):
        settings = settings_of(work, job, index)
        if get_int(settings, m.ROW_FAILED) != 0:
            bump(totals, get_int(settings, m.S_OUT) + 2, 1)


@stage
def nothing(work, totals, settings, first, count):
    """In the place of a stage that a second pass does not need."""
    return


@stage
def walk_again(work, totals, job, first, last):
    """Walks over the valid rows of a chunk that are not empty."""
    for row in range(first, last):
        if (get_int(get_int(job, m.J_ROW_N), row) > 0) & (get_int(get_int(job, m.J_ROW_INVALID), row) == 0):
            call(get_int(job, m.J_WALK), work, totals, job, row, 0)


@inline
def is_kept(job, start, position):
    """Whether keep at this address is not 0."""
    size = get_int(job, m.J_KEEP_BYTES)
    address = get_int(job, m.J_KEEP) + (start + position) * size
    kept = False
    for byte in range(size):
        kept |= get_int8(address, byte) != 0
    return kept


@stage
def sum_kept(work, table, revisit, first, last):
    """Writes the sum and the number of the applied weights of units with a kept token into `table`."""
    buffer, job, unit = get_int(revisit, R_BUFFER), get_int(revisit, R_JOB), get_int(revisit, R_UNIT)
    for row in range(first, last):
        if get_int(get_int(revisit, R_N), row) == 0:
            continue
        start = get_int(get_int(job, m.J_OFFSETS), row)
        length = get_int(get_int(job, m.J_OFFSETS), row + 1) - start
        mask, position, index, any_kept = row_address(job, m.J_MASK, row, start), 0, 0, False
        while next_run(work, job, mask, position, length):
            position = get_int(work, m.RUN_END)
            in_turn = False
            for at in range(get_int(work, m.RUN_START), position):
                kept = is_kept(job, start, at)
                in_turn |= kept
                if unit == PER_TOKEN:
                    if kept:
                        add(table, 0, get(buffer, start + index))
                        add(table, 1, 1.0)
                    index += 1
            any_kept |= in_turn
            if unit == PER_TURN:
                if in_turn:
                    add(table, 0, get(buffer, start + index))
                    add(table, 1, 1.0)
                index += 1
        if unit == PER_ROW and any_kept:
            add(table, 0, get(buffer, row))
            add(table, 1, 1.0)


@inline
def scaled(revisit, weight):
    """The weight divided by the mean, and at most upper."""
    return min(weight / get(revisit, R_MEAN), get(revisit, R_UPPER))


@stage
def rescale(work, totals, revisit, first, last):
    """Writes the normalised weights, and adds them to the sums."""
    buffer, job, unit = get_int(revisit, R_BUFFER), get_int(revisit, R_JOB), get_int(revisit, R_UNIT)
    out = get_int(revisit, R_OUT)
    for row in range(first, last):
        if get_int(get_int(revisit, R_N), row) == 0:
            continue
        start = get_int(get_int(job, m.J_OFFSETS), row)
        length = get_int(get_int(job, m.J_OFFSETS), row + 1) - start
        mask, position, index = row_address(job, m.J_MASK, row, start), 0, start
        weight = 0.0
        if unit == PER_ROW:
            weight = scaled(revisit, get(buffer, row))
            add_weight(totals, out, weight)
        while next_run(work, job, mask, position, length):
            position = get_int(work, m.RUN_END)
            if unit == PER_TURN:
                weight = scaled(revisit, get(buffer, index))
                add_weight(totals, out, weight)
                index += 1
            for at in range(get_int(work, m.RUN_START), position):
                if unit == PER_TOKEN:
                    weight = scaled(revisit, get(buffer, index))
                    add_weight(totals, out, weight)
                    index += 1
                put_float32(get_int(job, m.J_WEIGHTS), start + at, weight)
