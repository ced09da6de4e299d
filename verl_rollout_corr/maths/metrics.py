"""Metrics: each row of the table says what the metric is, which sums it needs and how it is computed from them.

A metric is computed once, from sums over the whole batch; finished metrics of micro-batches are never averaged. Over
nothing, a metric is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from verl_rollout_corr.maths import sum_table as s
from verl_rollout_corr.maths.histogram import abs_quantile, quantile
from verl_rollout_corr.maths.sum_table import Family, Layout, Sum, named
from verl_rollout_corr.maths.sums import Sums

PREFIX = "rollout_corr/"
"""What the name of every metric starts with."""


@dataclass(frozen=True)
class Metric:
    """One row of the table of metrics.

    `name`: without the prefix; `{...}` stands for a criterion or a bin. `definition`: the formula in words. `source`:
    where the name or the quantity comes from; "verl" where verl's name is kept. `formula`: from the values of `sums`,
    in that order, to the metric; None for what the hook adds in a run of verl.
    """

    name: str
    definition: str
    range: str
    meaning: str
    source: str
    sums: tuple[Sum, ...] = ()
    formula: Callable[..., float] | None = None

    @property
    def family(self) -> Family:
        """The family of its sums: the metric has one value for each member."""
        families = {row.family for row in self.sums} - {Family.BATCH}
        return families.pop() if families else Family.BATCH if self.sums else Family.RUN

    def at(self, label: str) -> str:
        """The name of the value for one member of the family, with the prefix."""
        return PREFIX + named(self.name, label)


def finalize(sums: Sums) -> dict[str, float]:
    """The metrics of these sums: one host copy, then plain numbers. Keys depend on the configuration only.

    Law: finalize(a + b) is finalize of the joined batch.
    """
    entries = sums.to_host().entries
    return {name: formula(*[entries[at] for at in places]) for name, formula, places in _plan(sums.layout)}


@lru_cache(maxsize=64)
def _plan(layout: Layout) -> list[tuple[str, Callable[..., float], tuple[int, ...]]]:
    """For each metric its name, its formula, and the positions of the entries that it needs."""
    return [
        (row.at(label), row.formula, tuple(layout.place(part, label) for part in row.sums))
        for row in METRICS
        if row.formula is not None
        for label in layout.labels(row.family)
    ]


def staleness_share(sums: Sums, engine: float | None) -> float:
    """The share of the batch's k3 that stale weights add to what the engine does at equal weights. Range [0, 1].

    The sum of k3 - f over the tokens of rows of lag > 0, floored at 0, over the sum of k3 of the batch; only tokens to
    which the trainer gives probability have a k3 here. f is `engine`: `fresh_k3`, in a run the median of the last 50
    updates that had rows of lag 0, so that one absurd row does not decide. 0 where no row is stale, or f is None.
    """
    host = sums.to_host()
    k3, stale_k3, tokens = (float(host.value(row)) for row in (s.K3, s.STALE_K3, s.STALE_TOKENS))
    if engine is None or k3 <= 0:
        return 0.0
    return min(max((stale_k3 - engine * tokens) / k3, 0.0), 1.0)


def fresh_k3(sums: Sums) -> float | None:
    """What the engine does at equal weights: k3 per token of the rows of lag 0, or None where there are none.

    A token with log pi_train = -inf counts as a token without k3.
    """
    host = sums.to_host()
    tokens = host.value(s.FRESH_TOKENS)
    return host.value(s.FRESH_K3) / tokens if tokens else None


def _mean(total: float, count: float) -> float:
    return total / count if count else 0.0


def _mean_off_one(total: float, count: float) -> float:
    return total / count - 1 if count else 0.0


def _mean_k3(k3: float, tokens: float, finite: float) -> float:
    """+inf if some token has probability 0 under pi_train, because its k3 is infinite."""
    return math.inf if finite < tokens else _mean(k3, tokens)


def _largest(maximum: float, count: float) -> float:
    return maximum if count else 0.0


def _smallest(negated: float, count: float) -> float:
    return -negated if count else 0.0


def _share_missing(part: float, whole: float) -> float:
    return (whole - part) / whole if whole else 0.0


def _deviation(off_one: float, off_one_square: float, count: float) -> float:
    about_one = _mean(off_one_square, count)
    variance = about_one - _mean(off_one, count) ** 2
    # A difference this small is rounding error of the two moments. It would depend on how the batch was cut.
    return math.sqrt(variance) if variance > 1e-13 * about_one else 0.0


def _effective_size(total: float, square: float, count: float) -> float:
    return min(total**2 / (count * square), 1.0) if count and square else 0.0


def _pearson(
    tokens: float,
    frequent: float,
    rare_p: float,
    rare_q: float,
    frequent_p: float,
    frequent_q: float,
    square_p: float,
    square_q: float,
    product: float,
) -> float:
    """The correlation of the probabilities from moments about 0 and 1; 0 where one side does not vary."""
    if not tokens:
        return 0.0
    parts = ((tokens - frequent, 0.0, rare_p, rare_q), (frequent, 1.0, frequent_p, frequent_q))
    mean_p = math.fsum((frequent, rare_p, frequent_p)) / tokens
    mean_q = math.fsum((frequent, rare_q, frequent_q)) / tokens
    var_p, var_q, covariance, size_p, size_q = square_p, square_q, product, square_p, square_q
    for count, centre, p, q in parts:
        off_p, off_q = centre - mean_p, centre - mean_q
        var_p += 2 * off_p * p + count * off_p * off_p
        var_q += 2 * off_q * q + count * off_q * off_q
        covariance += off_q * p + off_p * q + count * off_p * off_q
        size_p, size_q = size_p + count * off_p * off_p, size_q + count * off_q * off_q
    # A variance far smaller than the moments that it is computed from is mostly rounding error, and would depend on how
    # the batch was cut into micro-batches.
    # Frequent tokens have their moments about 1: below 1e-26 per token, a variance is float64's rounding of that 1.
    least = 1e-26 * frequent
    if var_p <= max(1e-7 * size_p, least) or var_q <= max(1e-7 * size_q, least):
        return 0.0
    return min(max(covariance / math.sqrt(var_p * var_q), -1.0), 1.0)


def _quantiles(of: Callable[[Sequence[int], int], float], percent: int) -> Callable[[Sequence[int]], float]:
    return lambda counts: of(counts, percent)


METRICS: tuple[Metric, ...] = (
    Metric(
        "kl",
        "mean over tokens of -l",
        "(-inf, inf)",
        "unbiased estimate of KL(mu || pi_train) per token",
        "verl; Schulman (2020), k1",
        (s.KL, s.FINITE),
        _mean,
    ),
    Metric(
        "k3_kl",
        "mean over tokens of r - 1 - l",
        "[0, inf]",
        "the same KL, never negative, less variance; inf where zero_prob_fraction is not 0",
        "verl; Schulman (2020), k3",
        (s.K3, s.TOKENS, s.FINITE),
        _mean_k3,
    ),
    Metric(
        "training_log_ppl",
        "mean over sequences of -a_i",
        "[0, inf)",
        "a_i = mean log pi_train of the sequence",
        "verl",
        (s.SEQ_TRAIN, s.FINITE_SEQS),
        _mean,
    ),
    Metric(
        "rollout_log_ppl",
        "mean over sequences of -b_i",
        "[0, inf)",
        "b_i = mean log mu of the sequence",
        "verl",
        (s.SEQ_ROLLOUT, s.FINITE_SEQS),
        _mean,
    ),
    Metric(
        "training_ppl",
        "mean over sequences of exp(-a_i)",
        "[1, e^20]",
        "perplexity under the trainer",
        "verl",
        (s.SEQ_TRAIN_PPL, s.FINITE_SEQS),
        _mean,
    ),
    Metric(
        "rollout_ppl",
        "mean over sequences of exp(-b_i)",
        "[1, e^20]",
        "perplexity under the engine",
        "verl",
        (s.SEQ_ROLLOUT_PPL, s.FINITE_SEQS),
        _mean,
    ),
    Metric(
        "log_ppl_diff",
        "mean over sequences of d_i = b_i - a_i",
        "(-inf, inf)",
        "> 0: the engine is surer",
        "verl",
        (s.SEQ_GAP, s.FINITE_SEQS),
        _mean,
    ),
    Metric(
        "log_ppl_abs_diff",
        "mean over sequences of |d_i|",
        "[0, inf)",
        "does not cancel over sequences",
        "verl",
        (s.SEQ_ABS_GAP, s.FINITE_SEQS),
        _mean,
    ),
    Metric(
        "log_ppl_diff_max",
        "max of d_i",
        "(-inf, inf)",
        "the worst sequence",
        "verl",
        (s.SEQ_GAP_MAX, s.FINITE_SEQS),
        _largest,
    ),
    Metric(
        "log_ppl_diff_min",
        "min of d_i",
        "(-inf, inf)",
        "the worst sequence on the other side",
        "verl",
        (s.SEQ_NEGATED_GAP_MAX, s.FINITE_SEQS),
        _smallest,
    ),
    Metric(
        "ppl_ratio",
        "mean over sequences of exp(d_i)",
        "[0, e^20]",
        "training over rollout perplexity",
        "verl",
        (s.SEQ_PPL_RATIO, s.FINITE_SEQS),
        _mean,
    ),
    Metric(
        "chi2_token",
        "mean over tokens of r^2, - 1",
        "[-1, inf)",
        "chi-squared divergence per token; < 0 by chance",
        "verl",
        (s.RATIO_SQUARED, s.TOKENS),
        _mean_off_one,
    ),
    Metric(
        "chi2_seq",
        "mean over sequences of (prod r)^2, - 1",
        "[-1, inf)",
        "variance of sequence weights; < 0 by chance",
        "verl",
        (s.SEQ_RATIO_SQUARED, s.SEQS),
        _mean_off_one,
    ),
    Metric(
        "abs_ratio_diff",
        "mean over tokens of |r - 1|",
        "[0, e^20)",
        "2 TV(mu, pi_train) in expectation",
        "DPPO, arXiv 2602.04879",
        (s.ABS, s.TOKENS),
        _mean,
    ),
    Metric(
        "prob_diff_mean",
        "mean over tokens of |pi_train - mu|",
        "[0, 1]",
        "difference of probabilities",
        "DPPO, arXiv 2602.04879",
        (s.PROB_DIFF, s.TOKENS),
        _mean,
    ),
    Metric(
        "prob_diff_max",
        "max over tokens of |pi_train - mu|",
        "[0, 1]",
        "the worst token",
        "DPPO, arXiv 2602.04879",
        (s.PROB_DIFF_MAX, s.TOKENS),
        _largest,
    ),
    Metric(
        "probs_pearson_corr",
        "Pearson correlation of pi_train(a) and mu(a)",
        "[-1, 1]",
        "1 when the engines agree",
        "this package",
        (
            s.TOKENS,
            s.FREQUENT,
            s.RARE_P,
            s.RARE_Q,
            s.FREQUENT_P,
            s.FREQUENT_Q,
            s.SQUARE_P,
            s.SQUARE_Q,
            s.PRODUCT_PQ,
        ),
        _pearson,
    ),
    *(
        Metric(
            f"log_ratio_p{percent:02d}",
            f"l below which {percent} % of the tokens lie",
            "[-inf, 32]",
            "one token cannot rule it; to an eighth of |l|, cut at 32, 0 below 1.9e-6",
            "this package",
            (s.LOG_RATIOS,),
            _quantiles(quantile, percent),
        )
        for percent in (1, 50, 99)
    ),
    *(
        Metric(
            f"abs_log_ratio_p{percent}",
            f"|l| below which {percent} % of the tokens lie",
            "[0, inf]",
            "the same of |l|: how far apart the two sides are, whatever the sign",
            "this package",
            (s.LOG_RATIOS,),
            _quantiles(abs_quantile, percent),
        )
        for percent in (50, 90, 99)
    ),
    Metric(
        "zero_prob_fraction",
        "share of tokens with log pi_train = -inf",
        "[0, 1]",
        "left out of means of l",
        "this package",
        (s.FINITE, s.TOKENS),
        _share_missing,
    ),
    Metric(
        "exact_zero_rollout_fraction",
        "share of tokens with log mu = 0.0 exactly and log pi_train < -1e-3",
        "[0, 1]",
        "missing log-probs stored as 0.0, or tokens that the framework appended",
        "this package",
        (s.ZERO_ROLLOUT, s.TOKENS),
        _mean,
    ),
    Metric(
        "exact_zero_train_fraction",
        "share of tokens with log pi_train = 0.0 exactly and log mu < -1e-3",
        "[0, 1]",
        "the same on the trainer's side",
        "this package",
        (s.ZERO_TRAIN, s.TOKENS),
        _mean,
    ),
    Metric(
        "constant_rollout_row_fraction",
        "share of sequences of at least 8 tokens with the same log mu for all, and not the same log pi_train",
        "[0, 1]",
        "one value written for every token, such as 0.0",
        "this package",
        (s.CONSTANT_ROLLOUT, s.SEQS),
        _mean,
    ),
    Metric(
        "noise_floor_k3_kl",
        "k3_kl of the rows with lag 0",
        "[0, inf]",
        "what the engine alone does, at equal weights",
        "this package",
        (s.FRESH_K3, s.FRESH_TOKENS, s.FRESH_FINITE),
        _mean_k3,
    ),
    Metric(
        "invalid_seq_fraction",
        "share of sequences with an invalid log-prob",
        "[0, 1]",
        "NaN, +inf, above 1e-3, log mu below -100",
        "this package",
        (s.INVALID_SEQS, s.ALL_SEQS),
        _mean,
    ),
    Metric(
        "rollout_rs_masked_fraction",
        "rejected tokens / tokens",
        "[0, 1]",
        "what training may not use",
        "verl",
        (s.REJECTED_TOKENS, s.ALL_TOKENS),
        _mean,
    ),
    Metric(
        "rollout_rs_seq_masked_fraction",
        "sequences with any token rejected / sequences",
        "[0, 1]",
        "touched sequences",
        "verl",
        (s.TOUCHED_SEQS, s.ALL_SEQS),
        _mean,
    ),
    Metric(
        "rollout_rs_seq_dropped_fraction",
        "sequences with every token rejected / sequences",
        "[0, 1]",
        "lost sequences",
        "this package",
        (s.DROPPED_SEQS, s.ALL_SEQS),
        _mean,
    ),
    Metric(
        "rollout_rs_{name}_mean",
        "mean of the statistic over its units",
        "as the statistic",
        "k1: of the ratio",
        "verl",
        (s.CRITERION_TOTAL, s.CRITERION_UNITS),
        _mean,
    ),
    Metric(
        "rollout_rs_{name}_max",
        "maximum over the units",
        "as the statistic",
        "compare with the upper bound",
        "verl",
        (s.CRITERION_MAX, s.CRITERION_UNITS),
        _largest,
    ),
    Metric(
        "rollout_rs_{name}_min",
        "minimum over the units; of a maximum of k1, over the tokens",
        "as the statistic",
        "compare with the lower bound",
        "verl",
        (s.CRITERION_NEGATED_MIN, s.CRITERION_UNITS),
        _smallest,
    ),
    Metric(
        "rollout_rs_{name}_masked_fraction",
        "tokens that this criterion rejects / tokens",
        "[0, 1]",
        "alone",
        "verl",
        (s.CRITERION_TOKENS, s.ALL_TOKENS),
        _mean,
    ),
    Metric(
        "rollout_rs_{name}_seq_masked_fraction",
        "sequences that this criterion touches / sequences",
        "[0, 1]",
        "alone",
        "verl",
        (s.CRITERION_SEQS, s.ALL_SEQS),
        _mean,
    ),
    Metric(
        "rollout_rs_lag_unknown_fraction",
        "valid sequences of unknown lag / valid sequences",
        "[0, 1]",
        "what the criterion lag lets pass without knowing",
        "this package",
        (s.LAG_UNKNOWN, s.SEQS),
        _mean,
    ),
    Metric(
        "rollout_is_mean",
        "mean of the applied weights over their units",
        "[0, e^20]",
        "1 if nothing is biased",
        "verl",
        (s.WEIGHT_TOTAL, s.WEIGHT_UNITS),
        _mean,
    ),
    Metric(
        "rollout_is_std",
        "their population standard deviation",
        "[0, inf)",
        "noise that the weights add",
        "verl",
        (s.WEIGHT_OFF_ONE, s.WEIGHT_OFF_ONE_SQUARE, s.WEIGHT_UNITS),
        _deviation,
    ),
    Metric(
        "rollout_is_min",
        "their minimum",
        "[0, e^20]",
        "0 where a weight is masked or pi_train gives no probability",
        "verl",
        (s.WEIGHT_NEGATED_MIN, s.WEIGHT_UNITS),
        _smallest,
    ),
    Metric(
        "rollout_is_max",
        "their maximum",
        "[0, e^20]",
        "never above the upper bound",
        "verl",
        (s.WEIGHT_MAX, s.WEIGHT_UNITS),
        _largest,
    ),
    Metric(
        "rollout_is_raw_mean",
        "mean of the weights before bounds and normalisation",
        "[0, e^20]",
        "1 in expectation for token and sequence products",
        "this package",
        (s.WEIGHT_RAW, s.WEIGHT_UNITS),
        _mean,
    ),
    Metric(
        "rollout_is_raw_min",
        "their minimum",
        "[0, e^20]",
        "what the lower bound cut",
        "this package",
        (s.WEIGHT_NEGATED_RAW_MIN, s.WEIGHT_UNITS),
        _smallest,
    ),
    Metric(
        "rollout_is_raw_max",
        "their maximum",
        "[0, e^20]",
        "what the upper bound cut",
        "this package",
        (s.WEIGHT_RAW_MAX, s.WEIGHT_UNITS),
        _largest,
    ),
    Metric(
        "rollout_is_eff_sample_size",
        "(sum w)^2 / (n sum w^2)",
        "[0, 1]",
        "share of the batch that still counts (Kish)",
        "verl; Kish (1965), Survey Sampling",
        (s.WEIGHT_TOTAL, s.WEIGHT_SQUARE, s.WEIGHT_UNITS),
        _effective_size,
    ),
    Metric(
        "rollout_is_ratio_fraction_high",
        "share of units with a raw weight above upper",
        "[0, 1]",
        "how often the upper bound acts",
        "verl",
        (s.WEIGHT_HIGH, s.WEIGHT_UNITS),
        _mean,
    ),
    Metric(
        "rollout_is_ratio_fraction_low",
        "share of units with a raw weight below lower",
        "[0, 1]",
        "how often the lower bound acts",
        "verl",
        (s.WEIGHT_LOW, s.WEIGHT_UNITS),
        _mean,
    ),
    Metric(
        "{bin}/fraction",
        "share of the tokens that fall into the bin",
        "[0, 1]",
        "0: the other values are empty",
        "this package",
        (s.BIN_TOKENS, s.TOKENS),
        _mean,
    ),
    Metric(
        "{bin}/kl",
        "kl within the bin",
        "(-inf, inf)",
        "by_prob, by_position and by_staleness",
        "this package",
        (s.BIN_KL, s.BIN_FINITE),
        _mean,
    ),
    Metric(
        "{bin}/k3_kl",
        "k3_kl within the bin",
        "[0, inf]",
        "where the mismatch sits",
        "this package",
        (s.BIN_K3, s.BIN_TOKENS, s.BIN_FINITE),
        _mean_k3,
    ),
    Metric(
        "{bin}/abs_log_ratio",
        "mean of |l| within the bin",
        "[0, inf)",
        "errors of both signs, no cancellation",
        "this package",
        (s.BIN_ABS, s.BIN_FINITE),
        _mean,
    ),
    Metric(
        "{bin}/prob_diff",
        "mean |pi_train - mu| within the bin",
        "[0, 1]",
        "the same in probabilities",
        "this package",
        (s.BIN_PROB_DIFF, s.BIN_TOKENS),
        _mean,
    ),
    Metric(
        "staleness_share",
        "(sum over rows of lag > 0 of k3 - f) / sum of k3, cut to [0, 1]; f: k3 per token at lag 0, the run's median",
        "[0, 1]",
        "by the trainer; 0 where no row is stale",
        "this package",
    ),
    Metric(
        "applied_kept_fraction",
        "kept / response tokens that the actor's loss saw",
        "[0, 1]",
        "by the workers",
        "this package",
    ),
    Metric(
        "applied_clipped_fraction",
        "kept tokens that PPO's clip silences / kept tokens",
        "[0, 1]",
        "by the workers; bypass mode with ppo_clip, else 0",
        "this package",
    ),
    Metric(
        "applied_weight",
        "sum of the weights of the kept tokens / response tokens that the actor's loss saw",
        "[0, e^20]",
        "by the workers; a rejected token adds 0 and, without weights, a kept one 1: 0.5 if half is rejected",
        "this package",
    ),
)
"""Every metric: what `finalize` computes, what the documentation lists and what the hook adds."""
