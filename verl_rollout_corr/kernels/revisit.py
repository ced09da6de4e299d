"""Stages that run after all rows, over the values in the buffers: buckets, cuts, means, weights."""

# pyright: basic
from __future__ import annotations

from verl_rollout_corr.kernels import memory as m
from verl_rollout_corr.kernels.machine import (
    add,
    bits_of,
    bump,
    call,
    clear,
    get,
    get_int,
    get_int8,
    inline,
    put,
    put_float32,
    put_int,
)
from verl_rollout_corr.kernels.rows import next_run, row_address
from verl_rollout_corr.kernels.stages import stage
from verl_rollout_corr.kernels.weighing import add_weight

_SIDE = 1024
BUCKETS = 2 * _SIDE
"""Eight to an octave of |value|, from 2^-64 to 2^64, on both sides of 0; beyond them the outermost."""
_SHIFT, _FIRST = 49, (1023 - 64) << 3

# A second job: what its stages share. `N`: tokens of valid rows.
R_JOB, R_BUFFER, R_N, R_BUCKET, R_CUT, R_UNIT, R_MEAN, R_UPPER, R_OUT, R_CUT_ROW, R_DROP = range(11)
REVISIT_WORDS = 11
"""Words of that job."""
PER_TOKEN, PER_TURN, PER_ROW = range(3)


@inline
def bucket_of(value):
    """The bucket of a value. It never decreases as the value grows."""
    reached = (bits_of(abs(value)) >> _SHIFT) - _FIRST
    reached = min(max(reached, 0), _SIDE - 1)
    return _SIDE - 1 - reached if value < 0.0 else _SIDE + reached


@stage
def fill_buckets(work, table, revisit, first, last):
    """Counts and sums of the values in each bucket; NaN, which is not a value, has a bucket of its own.

    `table`: BUCKETS + 1 pairs of counts, then of sums. The two of a pair are used in turn, so that two values of the
    same bucket need not wait for each other.
    """
    buffer, offsets = get_int(revisit, R_BUFFER), get_int(get_int(revisit, R_JOB), m.J_OFFSETS)
    sums = 2 * (BUCKETS + 1)
    for row in range(first, last):
        at = get_int(offsets, row)
        end = at + get_int(get_int(revisit, R_N), row)
        while at < end:
            count = min(m.BLOCK, end - at)
            for i in range(count):
                value = get(buffer, at + i)
                put_int(work, m.SCRATCH + i, 2 * (bucket_of(value) if value == value else BUCKETS) + (i & 1))
            for i in range(count):
                place = get_int(work, m.SCRATCH + i)
                bump(table, place, 1)
                add(table, sums + place, get(buffer, at + i))
            at += count


@stage
def collect_bucket(work, table, revisit, first, last):
    """The values of one bucket, or of all (-1), in order; `table`: the address to write them to."""
    buffer, offsets = get_int(revisit, R_BUFFER), get_int(get_int(revisit, R_JOB), m.J_OFFSETS)
    address, wanted = get_int(table, 0), get_int(revisit, R_BUCKET)
    found = 0
    for row in range(first, last):
        at = get_int(offsets, row)
        end = at + get_int(get_int(revisit, R_N), row)
        while at < end:
            count, some = min(64, end - at), wanted < 0
            for i in range(at, at + count):
                some |= bucket_of(get(buffer, i)) == wanted
            if some:
                for i in range(at, at + count):
                    value = get(buffer, i)
                    if value == value and (wanted < 0 or bucket_of(value) == wanted):
                        put(address, found, value)
                        found += 1
            at += count


@inline
def is_kept(job, start, position):
    """Whether keep at this address is not 0."""
    size = get_int(job, m.J_KEEP_BYTES)
    address = get_int(job, m.J_KEEP) + (start + position) * size
    kept = False
    for byte in range(size):
        kept |= get_int8(address, byte) != 0
    return kept


@inline
def leave_tie(table, job, row, start, position):
    """Clears keep for a value that equals the cut."""
    size = get_int(job, m.J_KEEP_BYTES)
    bump(table, 0, -1)
    bump(table, 1, 1)
    if is_kept(job, start, position):
        clear(get_int(job, m.J_KEEP) + (start + position) * size, size)
        bump(get_int(job, m.J_ROW_KEPT), row, -1)


@stage
def cut_row(work, table, revisit, row, unused):
    """Clears keep where values leave, in a row of which some do. `table`: ties that leave; tokens; touched rows."""
    job, cut = get_int(revisit, R_JOB), get(revisit, R_CUT)
    start = get_int(get_int(job, m.J_OFFSETS), row)
    length = get_int(get_int(job, m.J_OFFSETS), row + 1) - start
    mask, keep = row_address(job, m.J_MASK, row, start), get_int(job, m.J_KEEP)
    value_at, position = get_int(revisit, R_BUFFER) + 8 * start, 0
    while next_run(work, job, mask, position, length):
        first, position = get_int(work, m.RUN_START), get_int(work, m.RUN_END)
        count = position - first
        address = keep + (start + first) * get_int(job, m.J_KEEP_BYTES)
        put(work, m.SCRATCH, cut)
        call(get_int(revisit, R_DROP), work, value_at, address, 0, count)
        bump(table, 1, get_int(work, m.SCRATCH + 1))
        bump(get_int(job, m.J_ROW_KEPT), row, -get_int(work, m.SCRATCH + 2))
        if get_int(table, 0) > 0:
            for i in range(count):
                if (get(value_at, i) == cut) & (get_int(table, 0) > 0):
                    leave_tie(table, job, row, start, first + i)
        value_at += 8 * count
    bump(table, 2, 1)


@stage
def cut(work, table, revisit, first, last):
    """Clears keep for the values above the cut."""
    buffer, job, cut = get_int(revisit, R_BUFFER), get_int(revisit, R_JOB), get(revisit, R_CUT)
    for row in range(first, last):
        start = get_int(get_int(job, m.J_OFFSETS), row)
        above, equal = 0, 0
        for i in range(start, start + get_int(get_int(revisit, R_N), row)):
            value = get(buffer, i)
            above += value > cut
            equal += value == cut
        if (above > 0) | ((equal > 0) & (get_int(table, 0) > 0)):
            call(get_int(revisit, R_CUT_ROW), work, table, revisit, row, 0)


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
