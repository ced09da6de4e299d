"""The answer of a row: its runs of response tokens, the verdicts of its stages, and keep and weights."""

# pyright: basic
from __future__ import annotations

from verl_rollout_corr.kernels import memory as m
from verl_rollout_corr.kernels.machine import bump, call, clear, get, get_int, inline, put_float32, put_int
from verl_rollout_corr.kernels.stages import stage


@inline
def row_address(job, tensor, row, start):
    """The address where a row of a tensor begins. `start`: how many elements are before it, if rows are packed."""
    by_row = get_int(job, tensor + m.BY_ROW) != 0
    offset = row * get_int(job, tensor + m.ROW_BYTES) if by_row else start * get_int(job, tensor + m.ITEM_BYTES)
    return get_int(job, tensor + m.ADDRESS) + offset


@inline
def stage_word(job, index, word):
    """One word about a stage."""
    return get_int(get_int(job, m.J_STAGES), index * m.STAGE_WORDS + word)


@inline
def settings_of(work, job, index):
    """The address of this thread's settings of a stage."""
    return work + 8 * stage_word(job, index, m.SETTINGS)


@inline
def reduce_stages(work, totals, job, phase, first, count):
    """Passes tokens to the stages of a phase."""
    for index in range(get_int(job, m.J_STAGE_COUNT)):
        function = stage_word(job, index, m.REDUCE)
        if (stage_word(job, index, m.PHASE) == phase) & (function != 0):
            call(function, work, totals, settings_of(work, job, index), first, count)


@inline
def close_stages(work, totals, job, phase, first, count):
    """Ends a unit in the stages of a phase, and returns whether one of them rejects it."""
    put_int(work, m.FAILED, 0)
    for index in range(get_int(job, m.J_STAGE_COUNT)):
        function = stage_word(job, index, m.CLOSE)
        if (stage_word(job, index, m.PHASE) == phase) & (function != 0):
            call(function, work, totals, settings_of(work, job, index), first, count)
    return get_int(work, m.FAILED) != 0


@inline
def clear_keep(work, job, start, end):
    """Writes zeros into the row's keep."""
    size = get_int(job, m.J_KEEP_BYTES)
    clear(get_int(work, m.KEEP_ROW) + start * size, (end - start) * size)


@inline
def clear_answer(work, job, start, end):
    """Writes zeros into the row's keep and weights."""
    clear_keep(work, job, start, end)
    if get_int(job, m.J_WEIGHT_PHASE) != m.NO_WEIGHTS:
        clear(get_int(work, m.WEIGHTS_ROW) + 4 * start, 4 * (end - start))


@inline
def fill_weights(work, start, end):
    """Writes the weight of a unit for each of its tokens."""
    weight, address = get(work, m.UNIT_WEIGHT), get_int(work, m.WEIGHTS_ROW)
    for position in range(start, end):
        put_float32(address, position, weight)


@inline
def next_run(work, job, mask, position, length):
    """Finds the next run of response tokens, and returns whether there is one."""
    call(get_int(job, m.J_MASK + m.READ), work, get_int(job, m.J_KEEP_ONE), mask, position, length)
    return (get_int(work, m.RUN_START) < length) & (get_int(work, m.BAD_MASK) == 0)


@stage
def end_turn(work, totals, job, first, end):
    """The end of a turn at position `end`: verdicts, and the weight of its tokens."""
    turn = get_int(work, m.ROW_START) + get_int(work, m.TURN_NUMBER)
    start = get_int(work, m.TURN_START)
    if close_stages(work, totals, job, m.ON_TURN, turn, get_int(work, m.TURN_N)):
        clear_keep(work, job, start, end)
        bump(work, m.KEPT, -get_int(work, m.TURN_KEPT))
    if get_int(job, m.J_WEIGHT_PHASE) == m.ON_TURN:
        fill_weights(work, start, end)
    put_int(work, m.TURN_N, 0)
    put_int(work, m.TURN_KEPT, 0)
    bump(work, m.TURN_NUMBER, 1)


@inline
def answer_piece(work, totals, job, position, first, count, ends):
    """Writes the answer for a run of tokens of the block, and ends its turn."""
    if get_int(job, m.J_TURNS) != 0:
        reduce_stages(work, totals, job, m.ON_TURN, first, count)
    size = get_int(job, m.J_KEEP_BYTES)
    keep = get_int(work, m.KEEP_ROW) + position * size
    call(get_int(job, m.J_KEEP_STORE), work, get_int(job, m.J_KEEP_ONE), keep, first, count)
    if get_int(job, m.J_WEIGHT_PHASE) == m.ON_BLOCK:
        call(get_int(job, m.J_WEIGHT_STORE), work, 0, get_int(work, m.WEIGHTS_ROW) + 4 * position, first, count)
    kept = count
    if get_int(job, m.J_JUDGES_TOKENS) != 0:
        kept = 0
        for index in range(first, first + count):
            kept += get_int(work, m.KEEP + index)
    bump(work, m.KEPT, kept)
    if get_int(job, m.J_TURNS) != 0:
        if get_int(work, m.TURN_N) == 0:
            put_int(work, m.TURN_START, position)
        bump(work, m.TURN_N, count)
        bump(work, m.TURN_KEPT, kept)
        if ends != 0:
            call(get_int(job, m.J_END_TURN), work, totals, job, 0, position + count)
