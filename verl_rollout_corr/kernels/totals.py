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
"""Entries that follow from the counts of each row. They are behind the accumulators."""

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


_KINDS = (Kind.TOTAL, Kind.MAXIMUM)


def sums_of(program: Program, chunks: np.ndarray, rows: dict[Sum, float]) -> Sums:
    """The sums of chunks, (chunks, words), added in their order, and what follows from the rows."""
    neutral = program.neutral
    lowest, highest = neutral == np.inf, neutral == -np.inf
    plain = ~(lowest | highest)
    counted = slice(m.HISTOGRAM, m.HISTOGRAM + 2 * COUNT)
    plain[counted] = False
    total = neutral.copy()
    total[plain] = chunks[:, plain].sum(axis=0)
    total[lowest] = chunks[:, lowest].min(axis=0)
    total[highest] = chunks[:, highest].max(axis=0)
    counts = chunks.view(np.int64)[:, counted].sum(axis=0).reshape(2, COUNT).sum(axis=0)
    words = np.concatenate([total, [rows[entry] for entry in ROW_ENTRIES]])
    layout = program.layout
    totals, maxima = (torch.from_numpy(words[at] * sign) for at, sign in (_places(layout, kind) for kind in _KINDS))
    return Sums(layout, totals, maxima, torch.from_numpy(counts))


@lru_cache(maxsize=64)
def _places(layout: s.Layout, kind: Kind) -> tuple[np.ndarray, np.ndarray]:
    """The word and the sign of each entry of one kind."""
    weights = weights_at(len(layout.criteria))
    starts = {
        Family.BATCH: lambda _: 0,
        Family.WEIGHTS: lambda _: weights,
        Family.LAG: lambda _: 0,
        Family.CRITERION: criterion_at,
        Family.BIN: lambda number: m.PROBABILITY_SUMS + number * m.BIN_WORDS,
    }
    words: list[int] = []
    signs: list[float] = []
    for row in layout.rows(kind):
        for number in range(len(layout.labels(row.family))):
            known = row not in ROW_ENTRIES
            behind = weights + m.WEIGHT_WORDS
            words.append(starts[row.family](number) + _WORDS[row] if known else behind + ROW_ENTRIES.index(row))
            signs.append(-1.0 if row in _NEGATED else 1.0)
    return np.array(words, dtype=np.int64), np.array(signs)


assert len(BIN_NAMES) == (m.HISTOGRAM - m.PROBABILITY_SUMS) // m.BIN_WORDS
