"""The walk over the rows of a chunk: passes blocks of tokens through the stages, and ends rows."""

# pyright: basic
from __future__ import annotations

from verl_rollout_corr.kernels import memory as m
from verl_rollout_corr.kernels.answers import (
    answer_piece,
    clear_answer,
    clear_keep,
    close_stages,
    fill_weights,
    next_run,
    reduce_stages,
    row_address,
    settings_of,
)
from verl_rollout_corr.kernels.bins import next_edge, position_bin, staleness_bin
from verl_rollout_corr.kernels.exponential import ratio
from verl_rollout_corr.kernels.judging import start_unit
from verl_rollout_corr.kernels.machine import (
    add,
    bump,
    call,
    get,
    get_int,
    inline,
    prefetch,
    put,
    put_int,
)
from verl_rollout_corr.kernels.stages import stage
from verl_rollout_corr.maths.collection import CONSTANT_FROM


@inline
def read(job, tensor, work, slot, row, position, count):
    """Reads tokens of a row into a slot. `row`: the word that has its address."""
    address = get_int(work, row) + position * get_int(job, tensor + m.ITEM_BYTES)
    call(get_int(job, tensor + m.READ), work, 0, address, slot, count)


@inline
def fetch(work, address, item):
    """Asks memory for the next block of a row. Only so much at a time: a core waits when it has asked for too much."""
    prefetch(get_int(work, address) + get_int(work, m.NEXT) * item, m.BLOCK * item)


@stage
def flush(work, totals, job, unused, count):
    """A block of `count` tokens goes through all stages; stops at an invalid one."""
    position = get_int(work, m.POSITION)
    if position == 0:
        put(work, m.FIRST_TRAIN, get(work, m.TRAIN))
        put(work, m.FIRST_ROLLOUT, get(work, m.ROLLOUT))
    fetch(work, m.TRAIN_ROW, get_int(job, m.J_TRAIN + m.ITEM_BYTES))
    call(get_int(job, m.J_CHECK), work, totals, 0, 0, count)
    if get_int(work, m.INVALID) != 0:
        return
    fetch(work, m.ROLLOUT_ROW, get_int(job, m.J_ROLLOUT + m.ITEM_BYTES))
    call(get_int(job, m.J_RATIOS), work, totals, 0, 0, count)
    fetch(work, m.MASK_ROW, get_int(job, m.J_MASK + m.ITEM_BYTES))
    call(get_int(job, m.J_PROBABILITIES), work, totals, 0, 0, count)
    fetch(work, m.KEEP_ROW, get_int(job, m.J_KEEP_BYTES))
    for word in range(m.SUM_WORDS):
        add(work, m.ROW_SUMS + word, get(work, m.BLOCK_SUMS + word))
    if get_int(job, m.J_BINS) != 0:
        if next_edge(position) - position >= count:
            at = m.POSITION_SUMS + position_bin(position) * m.BIN_WORDS
            for word in range(m.BIN_WORDS):
                add(totals, at + word, get(work, m.BLOCK_SUMS + word))
        else:
            call(get_int(job, m.J_POSITIONS), work, totals, 0, position, count)
    if get_int(job, m.J_JUDGES_TOKENS) != 0:
        for index in range(count):
            put_int(work, m.KEEP + index, 1)
    reduce_stages(work, totals, job, m.ON_BLOCK, get_int(work, m.ROW_START) + position, count)
    reduce_stages(work, totals, job, m.ON_SEQ, 0, count)
    if get_int(job, m.J_WEIGHT_PHASE) == m.ON_BLOCK:
        fetch(work, m.WEIGHTS_ROW, 4)
    first = 0
    for piece in range(get_int(work, m.PIECE_COUNT)):
        at = m.PIECES + 3 * piece
        size = get_int(work, at + 1)
        answer_piece(work, totals, job, get_int(work, at), first, size, get_int(work, at + 2))
        first += size
    put_int(work, m.POSITION, position + count)
    put_int(work, m.FILLED, 0)
    put_int(work, m.PIECE_COUNT, 0)


@inline
def start_row(work, job, row, start):
    """Resets the state of the previous row."""
    for word in range(m.SUM_WORDS):
        put(work, m.ROW_SUMS + word, 0.0)
    put_int(work, m.ROW_START, start)
    put_int(work, m.KEEP_ROW, get_int(job, m.J_KEEP) + start * get_int(job, m.J_KEEP_BYTES))
    put_int(work, m.WEIGHTS_ROW, get_int(job, m.J_WEIGHTS) + 4 * start)
    put_int(work, m.TRAIN_ROW, row_address(job, m.J_TRAIN, row, start))
    put_int(work, m.ROLLOUT_ROW, row_address(job, m.J_ROLLOUT, row, start))
    put_int(work, m.ADVANTAGE_ROW, row_address(job, m.J_ADVANTAGE, row, start))
    put_int(work, m.MASK_ROW, row_address(job, m.J_MASK, row, start))
    put_int(work, m.LAG, get_int(get_int(job, m.J_LAGS), row))
    put_int(work, m.INVALID, 0)
    put_int(work, m.BAD_MASK, 0)
    put_int(work, m.CONSTANT, 0)
    put_int(work, m.KEPT, 0)
    put_int(work, m.LOST, 0)
    put_int(work, m.POSITION, 0)
    put_int(work, m.FILLED, 0)
    put_int(work, m.PIECE_COUNT, 0)
    put_int(work, m.TURN_N, 0)
    put_int(work, m.TURN_KEPT, 0)
    put_int(work, m.TURN_NUMBER, 0)
    for index in range(get_int(job, m.J_STAGE_COUNT)):
        settings = settings_of(work, job, index)
        put_int(settings, m.ROW_FAILED, 0)
        start_unit(settings)


@inline
def read_run(work, totals, job, start, end):
    """Reads a run of response tokens into blocks, and passes on each that is full."""
    position = start
    while position < end and get_int(work, m.INVALID) == 0:
        filled = get_int(work, m.FILLED)
        take = min(end - position, m.BLOCK - filled)
        read(job, m.J_TRAIN, work, m.TRAIN + filled, m.TRAIN_ROW, position, take)
        read(job, m.J_ROLLOUT, work, m.ROLLOUT + filled, m.ROLLOUT_ROW, position, take)
        if get_int(job, m.J_ADVANTAGE + m.READ) != 0:
            read(job, m.J_ADVANTAGE, work, m.ADVANTAGE + filled, m.ADVANTAGE_ROW, position, take)
        at = m.PIECES + 3 * get_int(work, m.PIECE_COUNT)
        put_int(work, at, position)
        put_int(work, at + 1, take)
        position += take
        put_int(work, m.NEXT, position)
        put_int(work, at + 2, 1 if position == end else 0)
        bump(work, m.PIECE_COUNT, 1)
        put_int(work, m.FILLED, filled + take)
        if filled + take == m.BLOCK:
            call(get_int(job, m.J_FLUSH), work, totals, job, 0, m.BLOCK)


@inline
def sum_row(work, totals, job, row, n):
    """Adds a row of `n` tokens to the sums of sequences and lags, and its sums to those of the batch."""
    sums = work + 8 * m.ROW_SUMS
    finite, sum_l, sum_rollout, k3 = get(sums, m.FINITE), get(sums, m.L), get(sums, m.ROLLOUT_SUM), get(sums, m.K3_SUM)
    add(totals, m.SEQS, 1.0)
    product = ratio(sum_l) if finite == n else 0.0
    add(totals, m.SEQS + 9, product * product)
    add(totals, m.SEQS + 10, 1.0 if (n >= CONSTANT_FROM) & (get_int(work, m.CONSTANT) == 2) else 0.0)
    if finite > 0:
        rollout, gap = sum_rollout / finite, -sum_l / finite
        train = (sum_rollout + sum_l) / finite
        add(totals, m.SEQS + 1, 1.0)
        add(totals, m.SEQS + 2, -train)
        add(totals, m.SEQS + 3, -rollout)
        add(totals, m.SEQS + 4, ratio(-train))
        add(totals, m.SEQS + 5, ratio(-rollout))
        add(totals, m.SEQS + 6, gap)
        add(totals, m.SEQS + 7, abs(gap))
        add(totals, m.SEQS + 8, ratio(gap))
        put(totals, m.SEQS + 11, max(get(totals, m.SEQS + 11), gap))
        put(totals, m.SEQS + 12, max(get(totals, m.SEQS + 12), -gap))
    for word in range(m.SUM_WORDS):
        add(totals, m.TOTALS + word, get(sums, word))
    lag = get_int(work, m.LAG)
    if lag == 0:
        add(totals, m.LAGS, float(n))
        add(totals, m.LAGS + 1, finite)
        add(totals, m.LAGS + 2, k3)
    elif lag > 0:
        add(totals, m.LAGS + 3, float(n))
        add(totals, m.LAGS + 4, k3)
    if get_int(job, m.J_BINS) != 0:
        at = m.STALENESS_SUMS + staleness_bin(lag) * m.BIN_WORDS
        for word in range(m.BIN_WORDS):
            add(totals, at + word, get(sums, word))


@stage
def end_row(work, totals, job, row, length):
    """The end of a row of `length` positions: verdicts, weights, sums."""
    n = get_int(work, m.POSITION)
    if close_stages(work, totals, job, m.ON_SEQ, row, n):
        clear_keep(work, job, 0, length)
        put_int(work, m.KEPT, 0)
    if get_int(job, m.J_WEIGHT_PHASE) == m.ON_SEQ:
        mask, position = get_int(work, m.MASK_ROW), 0
        while next_run(work, job, mask, position, length):
            position = get_int(work, m.RUN_END)
            fill_weights(work, get_int(work, m.RUN_START), position)
    for index in range(get_int(job, m.J_STAGE_COUNT)):
        settings = settings_of(work, job, index)
        if get_int(settings, m.ROW_FAILED) != 0:
            add(totals, get_int(settings, m.S_OUT) + m.FAILED_SEQS, 1.0)
    sum_row(work, totals, job, row, n)
    put_int(get_int(job, m.J_ROW_N), row, n)
    put_int(get_int(job, m.J_ROW_KEPT), row, get_int(work, m.KEPT))


@stage
def reject_row(work, totals, job, row, length):
    """Rejects a row with an invalid log-prob: its sums are dropped, and its keep and weights are 0."""
    for word in range(get_int(job, m.J_SUM_WORDS)):
        put_int(totals, word, get_int(work, get_int(job, m.J_SAVED) + word))
    clear_answer(work, job, 0, length)
    mask, n, position = get_int(work, m.MASK_ROW), 0, 0
    while next_run(work, job, mask, position, length):
        position = get_int(work, m.RUN_END)
        n += position - get_int(work, m.RUN_START)
    put_int(get_int(job, m.J_ROW_N), row, n)
    put_int(get_int(job, m.J_ROW_INVALID), row, 1)


@stage
def walk_row(work, totals, job, row, unused):
    """One row."""
    offsets = get_int(job, m.J_OFFSETS)
    start = get_int(offsets, row)
    length = get_int(offsets, row + 1) - start
    if get_int(job, m.J_REJECT_INVALID) != 0:
        for word in range(get_int(job, m.J_SUM_WORDS)):
            put_int(work, get_int(job, m.J_SAVED) + word, get_int(totals, word))
    start_row(work, job, row, start)
    mask, position = get_int(work, m.MASK_ROW), 0
    # The mask is read as far as a block, so that memory can fetch the next part meanwhile. The end of a turn shows only
    # in a mask that is read as a whole.
    window = length if get_int(job, m.J_TURNS) != 0 else m.BLOCK
    while position < length and get_int(work, m.INVALID) == 0 and get_int(work, m.BAD_MASK) == 0:
        limit = min(length, position + window)
        next_run(work, job, mask, position, limit)
        clear_answer(work, job, position, get_int(work, m.RUN_START))
        position = get_int(work, m.RUN_END)
        read_run(work, totals, job, get_int(work, m.RUN_START), position)
    filled = get_int(work, m.FILLED)
    if (filled > 0) & (get_int(work, m.INVALID) == 0):
        call(get_int(job, m.J_FLUSH), work, totals, job, 0, filled)
    refused = (get_int(work, m.INVALID) != 0) & (get_int(job, m.J_REJECT_INVALID) == 0)
    if refused | (get_int(work, m.BAD_MASK) != 0):
        put_int(job, m.J_STATUS, m.REFUSED)
    elif get_int(work, m.INVALID) != 0:
        call(get_int(job, m.J_REJECT_ROW), work, totals, job, row, length)
    elif get_int(work, m.POSITION) > 0:
        call(get_int(job, m.J_END_ROW), work, totals, job, row, length)


@stage
def walk(work, totals, job, first, last):
    """Walks over the rows of a chunk, until one is refused."""
    for row in range(first, last):
        call(get_int(job, m.J_WALK), work, totals, job, row, 0)
        if get_int(job, m.J_STATUS) != m.FINE:
            return
