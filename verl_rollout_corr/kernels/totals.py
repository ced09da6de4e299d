"""Turns the kernels' accumulators into `Sums`: which word each entry of `maths.sum_table` is."""

# pyright: basic
from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from verl_rollout_corr.kernels import memory as m
from verl_rollout_corr.kernels.program import Program, criterion_at, weights_at
from verl_rollout_corr.maths import sum_table as s
from verl_rollout_corr.maths.bins import BIN_NAMES
from verl_rollout_corr.maths.histogram import COUNT
from verl_rollout_corr.maths.sum_table import Family, Kind, Sum
from verl_rollout_corr.maths.sums import Sums

ROW_ENTRIES = (
    s.ALL_TOKENS,
    s.ALL_SEQS,
    s.REJECTED_TOKENS,
    s.TOUCHED_SEQS,
    s.DROPPED_SEQS,
    s.INVALID_SEQS,
    s.LAG_UNKNOWN,
)
"""Entries that follow from the counts of each row."""

_WORDS: dict[Sum, int] = {
    s.TOKENS: m.TOTALS + m.N,
    s.FINITE: m.TOTALS + m.FINITE,
    s.KL: m.TOTALS + m.L,
    s.K3: m.TOTALS + m.K3_SUM,
    s.ABS: m.TOTALS + m.OFF_ONE_SUM,
    s.RATIO_SQUARED: m.TOTALS + m.SQUARE,
    s.PROB_DIFF: m.TOTALS + m.TV,
    s.PROB_DIFF_MAX: m.TV_MAX,
    s.ZERO_ROLLOUT: m.ZERO_ROLLOUT,
    s.ZERO_TRAIN: m.ZERO_TRAIN,
    s.FREQUENT: m.MOMENTS,
    s.RARE_P: m.MOMENTS + 1,
    s.RARE_Q: m.MOMENTS + 2,
    s.FREQUENT_P: m.MOMENTS + 3,
    s.FREQUENT_Q: m.MOMENTS + 4,
    s.SQUARE_P: m.MOMENTS + 5,
    s.SQUARE_Q: m.MOMENTS + 6,
    s.PRODUCT_PQ: m.MOMENTS + 7,
    s.SEQS: m.SEQS,
    s.FINITE_SEQS: m.SEQS + 1,
    s.SEQ_TRAIN: m.SEQS + 2,
    s.SEQ_ROLLOUT: m.SEQS + 3,
    s.SEQ_TRAIN_PPL: m.SEQS + 4,
    s.SEQ_ROLLOUT_PPL: m.SEQS + 5,
    s.SEQ_GAP: m.SEQS + 6,
    s.SEQ_ABS_GAP: m.SEQS + 7,
    s.SEQ_PPL_RATIO: m.SEQS + 8,
    s.SEQ_RATIO_SQUARED: m.SEQS + 9,
    s.CONSTANT_ROLLOUT: m.SEQS + 10,
    s.SEQ_GAP_MAX: m.SEQS + 11,
    s.SEQ_NEGATED_GAP_MAX: m.SEQS + 12,
    s.FRESH_TOKENS: m.LAGS,
    s.FRESH_FINITE: m.LAGS + 1,
    s.FRESH_K3: m.LAGS + 2,
    s.STALE_TOKENS: m.LAGS + 3,
    s.STALE_K3: m.LAGS + 4,
    s.CRITERION_UNITS: m.UNITS,
    s.CRITERION_TOTAL: m.TOTAL,
    s.CRITERION_TOKENS: m.TOKENS,
    s.CRITERION_SEQS: m.FAILED_SEQS,
    s.CRITERION_MAX: m.MAXIMUM,
    s.CRITERION_NEGATED_MIN: m.MINIMUM,
    s.WEIGHT_UNITS: m.W_UNITS,
    s.WEIGHT_TOTAL: m.W_TOTAL,
    s.WEIGHT_SQUARE: m.W_SQUARE,
    s.WEIGHT_OFF_ONE: m.W_OFF_ONE,
    s.WEIGHT_OFF_ONE_SQUARE: m.W_OFF_ONE_SQUARE,
    s.WEIGHT_RAW: m.W_RAW,
    s.WEIGHT_HIGH: m.W_HIGH,
    s.WEIGHT_LOW: m.W_LOW,
    s.WEIGHT_MAX: m.W_MAX,
    s.WEIGHT_NEGATED_MIN: m.W_MIN,
    s.WEIGHT_RAW_MAX: m.W_RAW_MAX,
    s.WEIGHT_NEGATED_RAW_MIN: m.W_RAW_MIN,
    s.BIN_TOKENS: m.N,
    s.BIN_FINITE: m.FINITE,
    s.BIN_KL: m.L,
    s.BIN_ABS: m.ABS_L,
    s.BIN_K3: m.K3_SUM,
    s.BIN_PROB_DIFF: m.TV,
}
"""The word of each entry, counted from the start of the sums, or from that of its criterion, the weights or its bin."""

_NEGATED = {s.KL, s.BIN_KL, s.CRITERION_NEGATED_MIN, s.WEIGHT_NEGATED_MIN, s.WEIGHT_NEGATED_RAW_MIN}
"""Entries that are the negative of their word: sums of -l, and minima."""

KNOWN = {*_WORDS, *ROW_ENTRIES, s.LOG_RATIOS}
"""Entries that the kernels compute. A configuration with any other one is left to the definition."""


def sums_of(program: Program, chunks: np.ndarray, rows: dict[Sum, float]) -> Sums:
    """The sums of chunks, (chunks, words), added in their order, and what follows from the rows."""
    layout = program.layout
    at, sign, entries = _places(layout, Kind.TOTAL)
    totals = np.add.reduce(chunks[:, at], axis=0) * sign
    for place, entry in entries:
        totals[place] = rows[entry]
    at, sign, _ = _places(layout, Kind.MAXIMUM)
    maxima = np.maximum.reduce(chunks[:, at] * sign, axis=0)
    counts = np.add.reduce(chunks.view(np.int64)[:, m.HISTOGRAM : m.HISTOGRAM + 2 * COUNT], axis=0)
    counts = counts[:COUNT] + counts[COUNT:]
    return Sums(layout, *(torch.from_numpy(found) for found in (totals, maxima, counts)))


@lru_cache(maxsize=64)
def _places(layout: s.Layout, kind: Kind) -> tuple[np.ndarray, np.ndarray, list[tuple[int, Sum]]]:
    """The word and the sign of each entry of one kind, and the places of the entries that follow from the rows."""
    starts = {
        Family.BATCH: lambda _: 0,
        Family.WEIGHTS: lambda _: weights_at(len(layout.criteria)),
        Family.LAG: lambda _: 0,
        Family.CRITERION: criterion_at,
        Family.BIN: lambda number: m.PROBABILITY_SUMS + number * m.BIN_WORDS,
    }
    entries = [(row, number) for row in layout.rows(kind) for number in range(len(layout.labels(row.family)))]
    words = [starts[row.family](number) + _WORDS.get(row, 0) for row, number in entries]
    signs = [-1.0 if row in _NEGATED else 1.0 for row, _ in entries]
    of_rows = [(place, row) for place, (row, _) in enumerate(entries) if row in ROW_ENTRIES]
    return np.array(words, dtype=np.int64), np.array(signs), of_rows


assert len(BIN_NAMES) == (m.HISTOGRAM - m.PROBABILITY_SUMS) // m.BIN_WORDS
