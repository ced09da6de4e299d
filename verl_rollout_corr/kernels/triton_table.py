"""What host and device of the twin on a GPU agree on: codes of the configuration, and the order of a row's sums."""

from __future__ import annotations

from verl_rollout_corr.grammar import Agg, Outside, Scope, Stat, When
from verl_rollout_corr.maths import sum_table as s
from verl_rollout_corr.maths.bins import BIN_NAMES

STATS = {Stat.K1: 0, Stat.K2: 1, Stat.K3: 2, Stat.ABS: 3, Stat.TV: 4, Stat.BKL: 5, Stat.BKL_MU: 6, Stat.LAG: 7}
"""Codes of the statistics in the table of criteria."""
AGGS = {None: 0, Agg.SUM: 1, Agg.MEAN: 2, Agg.MAX: 3}
"""Codes of the aggregations."""
SCOPES = {Scope.TOKEN: 0, Scope.SEQ: 1}
"""Codes of the scopes that the kernel knows."""
WHENS = {None: 0, When.NEGATIVE_ADVANTAGE: 1, When.POSITIVE_ADVANTAGE: 2, When.OUTWARD: 3}
"""Codes of `when`."""
OUTSIDES = {Outside.TRUNCATE: 0, Outside.MASK: 1}
"""Codes of what happens to a weight outside its bounds."""
CRITERION_WORDS = 8
"""Stat, scope, aggregation, when, lower and upper in the statistic's scale, and both rounded to what is compared."""
WEIGHT_WORDS = 8
"""Level, aggregation, outside, lower and upper, both rounded to what is compared, and one that is not used."""
NO_WEIGHTS, TOKEN_WEIGHTS, PREFIX_WEIGHTS, ROW_WEIGHTS = range(4)

ROW_TOTALS = (
    s.ALL_TOKENS,
    s.ALL_SEQS,
    s.REJECTED_TOKENS,
    s.TOUCHED_SEQS,
    s.DROPPED_SEQS,
    s.INVALID_SEQS,
    s.TOKENS,
    s.FINITE,
    s.KL,
    s.K3,
    s.ABS,
    s.RATIO_SQUARED,
    s.PROB_DIFF,
    s.ZERO_ROLLOUT,
    s.ZERO_TRAIN,
    s.FREQUENT,
    s.RARE_P,
    s.RARE_Q,
    s.FREQUENT_P,
    s.FREQUENT_Q,
    s.SQUARE_P,
    s.SQUARE_Q,
    s.PRODUCT_PQ,
    s.SEQS,
    s.FINITE_SEQS,
    s.SEQ_TRAIN,
    s.SEQ_ROLLOUT,
    s.SEQ_TRAIN_PPL,
    s.SEQ_ROLLOUT_PPL,
    s.SEQ_GAP,
    s.SEQ_ABS_GAP,
    s.SEQ_PPL_RATIO,
    s.SEQ_RATIO_SQUARED,
    s.CONSTANT_ROLLOUT,
    s.FRESH_TOKENS,
    s.FRESH_FINITE,
    s.FRESH_K3,
    s.STALE_TOKENS,
    s.STALE_K3,
    s.LAG_UNKNOWN,
    s.WEIGHT_UNITS,
    s.WEIGHT_TOTAL,
    s.WEIGHT_SQUARE,
    s.WEIGHT_OFF_ONE,
    s.WEIGHT_OFF_ONE_SQUARE,
    s.WEIGHT_RAW,
    s.WEIGHT_HIGH,
    s.WEIGHT_LOW,
)
"""The totals of a row, in the order in which the program writes them; bins and criteria follow."""
ROW_MAXIMA = (
    s.PROB_DIFF_MAX,
    s.SEQ_GAP_MAX,
    s.SEQ_NEGATED_GAP_MAX,
    s.WEIGHT_MAX,
    s.WEIGHT_NEGATED_MIN,
    s.WEIGHT_RAW_MAX,
    s.WEIGHT_NEGATED_RAW_MIN,
)
"""The maxima of a row, likewise."""
BIN_TOTALS = (s.BIN_TOKENS, s.BIN_FINITE, s.BIN_KL, s.BIN_ABS, s.BIN_K3, s.BIN_PROB_DIFF)
"""The totals of each bin of each partition, in the order of the partitions."""
CRITERION_TOTALS = (s.CRITERION_UNITS, s.CRITERION_TOTAL, s.CRITERION_TOKENS, s.CRITERION_SEQS)
"""The totals of each criterion, in order."""
CRITERION_MAXIMA = (s.CRITERION_MAX, s.CRITERION_NEGATED_MIN)
"""The maxima of each criterion, in order."""

assert ROW_TOTALS.index(s.WEIGHT_LOW) == 47 and len(ROW_TOTALS) + 6 * len(BIN_NAMES) <= 256 and len(ROW_MAXIMA) <= 8
