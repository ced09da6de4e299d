"""Metrics: the table that names and explains them, and the one place where sums become values.

Nothing is averaged that is not an average: a value is computed once, from sums over the whole batch. A metric over
nothing is 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from verl_rollout_corr.collection import POSITION_BINS, PROBABILITY_BINS, PROBABILITY_CENTRES, STALENESS_BINS
from verl_rollout_corr.sums import Sums

PREFIX = "rollout_corr/"
"""What the name of every metric starts with."""


@dataclass(frozen=True)
class MetricInfo:
    """One row of the table of metrics: `name` without the prefix; `{...}` stands for a criterion or a bin.

    `source`: where the name or the quantity comes from; "verl" where verl's name is kept.
    """

    name: str
    formula: str
    range: str
    meaning: str
    source: str


METRICS: tuple[MetricInfo, ...] = (
    MetricInfo(
        "kl",
        "mean over tokens of -l",
        "(-inf, inf)",
        "unbiased estimate of KL(mu || pi_train) per token",
        "verl; Schulman (2020), k1",
    ),
    MetricInfo(
        "k3_kl",
        "mean over tokens of r - 1 - l",
        "[0, inf]",
        "the same KL, never negative, less variance",
        "verl; Schulman (2020), k3",
    ),
    MetricInfo(
        "training_log_ppl", "mean over sequences of -a_i", "[0, inf)", "a_i = mean log pi_train of the sequence", "verl"
    ),
    MetricInfo(
        "rollout_log_ppl", "mean over sequences of -b_i", "[0, inf)", "b_i = mean log mu of the sequence", "verl"
    ),
    MetricInfo("training_ppl", "mean over sequences of exp(-a_i)", "[1, inf)", "perplexity under the trainer", "verl"),
    MetricInfo("rollout_ppl", "mean over sequences of exp(-b_i)", "[1, inf)", "perplexity under the engine", "verl"),
    MetricInfo(
        "log_ppl_diff", "mean over sequences of d_i = b_i - a_i", "(-inf, inf)", "> 0: the engine is surer", "verl"
    ),
    MetricInfo(
        "log_ppl_abs_diff", "mean over sequences of |d_i|", "[0, inf)", "does not cancel over sequences", "verl"
    ),
    MetricInfo("log_ppl_diff_max", "max of d_i", "(-inf, inf)", "the worst sequence", "verl"),
    MetricInfo("log_ppl_diff_min", "min of d_i", "(-inf, inf)", "the worst sequence on the other side", "verl"),
    MetricInfo("ppl_ratio", "mean over sequences of exp(d_i)", "[0, e^20]", "training over rollout perplexity", "verl"),
    MetricInfo(
        "chi2_token",
        "mean over tokens of r^2, - 1",
        "[-1, inf)",
        "chi-squared divergence per token; < 0 by chance",
        "verl",
    ),
    MetricInfo(
        "chi2_seq",
        "mean over sequences of (prod r)^2, - 1",
        "[-1, inf)",
        "variance of sequence weights; < 0 by chance",
        "verl",
    ),
    MetricInfo(
        "abs_ratio_diff",
        "mean over tokens of |r - 1|",
        "[0, e^20)",
        "2 TV(mu, pi_train) in expectation",
        "DPPO, arXiv 2602.04879",
    ),
    MetricInfo(
        "prob_diff_mean",
        "mean over tokens of |pi_train - mu|",
        "[0, 1]",
        "difference of probabilities",
        "DPPO, arXiv 2602.04879",
    ),
    MetricInfo(
        "prob_diff_max", "max over tokens of |pi_train - mu|", "[0, 1]", "the worst token", "DPPO, arXiv 2602.04879"
    ),
    MetricInfo(
        "probs_pearson_corr",
        "Pearson correlation of pi_train(a) and mu(a)",
        "[-1, 1]",
        "1 when the engines agree",
        "this package",
    ),
    MetricInfo(
        "zero_prob_fraction",
        "share of tokens with log pi_train = -inf",
        "[0, 1]",
        "left out of means of l",
        "this package",
    ),
    MetricInfo(
        "exact_zero_rollout_fraction",
        "share of tokens with log mu = 0.0 exactly and log pi_train < -0.1",
        "[0, 1]",
        "missing log-probs stored as 0.0, or tokens that the framework appended",
        "this package",
    ),
    MetricInfo(
        "exact_zero_training_fraction",
        "share of tokens with log pi_train = 0.0 exactly and log mu < -0.1",
        "[0, 1]",
        "the same on the trainer's side",
        "this package",
    ),
    MetricInfo(
        "invalid_seq_fraction",
        "share of sequences with an invalid log-prob",
        "[0, 1]",
        "NaN, +inf, above 1e-3, log mu = -inf",
        "this package",
    ),
    MetricInfo("rollout_rs_masked_fraction", "rejected tokens / tokens", "[0, 1]", "what training may not use", "verl"),
    MetricInfo(
        "rollout_rs_seq_masked_fraction",
        "sequences with any token rejected / sequences",
        "[0, 1]",
        "touched sequences",
        "verl",
    ),
    MetricInfo(
        "rollout_rs_seq_dropped_fraction",
        "sequences with every token rejected / sequences",
        "[0, 1]",
        "lost sequences",
        "this package",
    ),
    MetricInfo(
        "rollout_rs_{name}_mean", "mean of the statistic over its units", "as the statistic", "k1: of the ratio", "verl"
    ),
    MetricInfo(
        "rollout_rs_{name}_max", "maximum over the units", "as the statistic", "compare with the upper bound", "verl"
    ),
    MetricInfo(
        "rollout_rs_{name}_min", "minimum over the units", "as the statistic", "compare with the lower bound", "verl"
    ),
    MetricInfo(
        "rollout_rs_{name}_masked_fraction", "tokens that this criterion rejects / tokens", "[0, 1]", "alone", "verl"
    ),
    MetricInfo(
        "rollout_rs_{name}_seq_masked_fraction",
        "sequences that this criterion touches / sequences",
        "[0, 1]",
        "alone",
        "verl",
    ),
    MetricInfo(
        "rollout_is_mean", "mean of the applied weights over their units", "[0, e^20]", "1 if nothing is biased", "verl"
    ),
    MetricInfo(
        "rollout_is_std", "their population standard deviation", "[0, inf)", "noise that the weights add", "verl"
    ),
    MetricInfo(
        "rollout_is_min",
        "their minimum",
        "[0, e^20]",
        "0 where a weight is masked or pi_train gives no probability",
        "verl",
    ),
    MetricInfo("rollout_is_max", "their maximum", "[0, e^20]", "never above the upper bound", "verl"),
    MetricInfo(
        "rollout_is_raw_mean",
        "mean of the weights before bounds and normalisation",
        "[0, e^20]",
        "1 in expectation for token and sequence products",
        "this package",
    ),
    MetricInfo("rollout_is_raw_min", "their minimum", "[0, e^20]", "what the lower bound cut", "this package"),
    MetricInfo("rollout_is_raw_max", "their maximum", "[0, e^20]", "what the upper bound cut", "this package"),
    MetricInfo(
        "rollout_is_eff_sample_size",
        "(sum w)^2 / (n sum w^2)",
        "[0, 1]",
        "share of the batch that still counts (Kish)",
        "verl; Kish (1965), Survey Sampling",
    ),
    MetricInfo(
        "rollout_is_ratio_fraction_high",
        "share of units with a raw weight above upper",
        "[0, 1]",
        "how often the upper bound acts",
        "verl",
    ),
    MetricInfo(
        "rollout_is_ratio_fraction_low",
        "share of units with a raw weight below lower",
        "[0, 1]",
        "how often the lower bound acts",
        "verl",
    ),
    MetricInfo(
        "{bin}/fraction",
        "share of the tokens that fall into the bin",
        "[0, 1]",
        "0: the other values are empty",
        "this package",
    ),
    MetricInfo("{bin}/kl", "kl within the bin", "(-inf, inf)", "by_prob, by_position and by_staleness", "this package"),
    MetricInfo("{bin}/k3_kl", "k3_kl within the bin", "[0, inf]", "where the mismatch sits", "this package"),
    MetricInfo(
        "{bin}/abs_log_ratio",
        "mean of |l| within the bin",
        "[0, inf)",
        "errors of both signs, no cancellation",
        "this package",
    ),
    MetricInfo(
        "{bin}/prob_diff", "mean |pi_train - mu| within the bin", "[0, 1]", "the same in probabilities", "this package"
    ),
    MetricInfo(
        "noise_floor_k3_kl",
        "k3_kl of the rows with lag 0",
        "[0, inf]",
        "what the engine alone does, at equal weights",
        "this package",
    ),
    MetricInfo(
        "staleness_share",
        "1 - f / k3_kl, cut to [0, 1]; f: k3_kl of all rows of lag 0 in the run so far",
        "[0, 1]",
        "by the trainer; 0 before the first such row",
        "this package",
    ),
    MetricInfo(
        "applied_kept_fraction",
        "kept / response tokens that the actor's loss saw",
        "[0, 1]",
        "by the workers",
        "this package",
    ),
    MetricInfo(
        "applied_clipped_fraction",
        "kept tokens that PPO's clip silences / kept tokens",
        "[0, 1]",
        "by the workers; bypass mode with ppo_clip, else 0",
        "this package",
    ),
    MetricInfo(
        "applied_weight",
        "sum of the weights of the kept tokens / response tokens that the actor's loss saw",
        "[0, e^20]",
        "by the workers; a rejected token adds 0 and, without weights, a kept one 1: 0.5 if half is rejected",
        "this package",
    ),
)
"""Every metric, for the documentation; a test checks that no other name is emitted."""

_BINS = (
    ("by_prob", "prob", PROBABILITY_BINS),
    ("by_position", "position", POSITION_BINS),
    ("by_staleness", "staleness", STALENESS_BINS),
)


def finalize(sums: Sums) -> dict[str, float]:
    """The metrics of these sums: one host copy, then plain numbers. Keys depend on the configuration only.

    Law: finalize(a + b) is finalize of the joined batch.
    """
    totals, maxima = sums.to_host()
    values: dict[str, float] = {}
    _mismatch(totals, maxima, values)
    _rejection(totals, maxima, values)
    if "weight/n" in totals:
        _weights(totals, maxima, values)
    for group, kind, labels in _BINS:
        for label in labels:
            _bin(f"{group}/{label}", f"{kind}/{label}", totals, values)
    values["noise_floor_k3_kl"] = values["by_staleness/lag_0/k3_kl"]
    return {PREFIX + name: value for name, value in values.items()}


def staleness_share(sums: Sums, floor_sums: Sums) -> float:
    """1 - floor / k3_kl, cut to [0, 1]: the share of the mismatch that stale weights add to the engine's own.

    `floor_sums` are sums that hold rows of lag 0 (of this batch or earlier ones). 0 if either side is empty.
    """
    totals, _ = sums.to_host()
    floor_totals, _ = floor_sums.to_host()
    total = _ratio(totals["token/k3"], totals["token/n"])
    floor_count = floor_totals["staleness/lag_0/n"]
    if total <= 0 or floor_count == 0:
        return 0.0
    floor = floor_totals["staleness/lag_0/k3"] / floor_count
    if math.isinf(total):
        return 0.0 if math.isinf(floor) else 1.0
    return min(max(1 - floor / total, 0.0), 1.0)


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0


def _extreme(value: float, count: float) -> float:
    return value if count else 0.0


def _mismatch(totals: dict[str, float], maxima: dict[str, float], values: dict[str, float]) -> None:
    tokens, finite = totals["token/n"], totals["token/finite"]
    some, seqs = totals["seq/finite"], totals["seq/n"]
    values["kl"] = _ratio(totals["token/kl"], finite)
    values["k3_kl"] = _ratio(totals["token/k3"], tokens)
    values["training_log_ppl"] = _ratio(totals["seq/train"], some)
    values["rollout_log_ppl"] = _ratio(totals["seq/rollout"], some)
    values["training_ppl"] = _ratio(totals["seq/train_ppl"], some)
    values["rollout_ppl"] = _ratio(totals["seq/rollout_ppl"], some)
    values["log_ppl_diff"] = _ratio(totals["seq/gap"], some)
    values["log_ppl_abs_diff"] = _ratio(totals["seq/abs_gap"], some)
    values["log_ppl_diff_max"] = _extreme(maxima["seq/gap"], some)
    values["log_ppl_diff_min"] = _extreme(-maxima["seq/negated_gap"], some)
    values["ppl_ratio"] = _ratio(totals["seq/ppl_ratio"], some)
    values["chi2_token"] = totals["token/r2"] / tokens - 1 if tokens else 0.0
    values["chi2_seq"] = totals["seq/r2"] / seqs - 1 if seqs else 0.0
    values["abs_ratio_diff"] = _ratio(totals["token/abs"], tokens)
    values["prob_diff_mean"] = _ratio(totals["token/tv"], tokens)
    values["prob_diff_max"] = _extreme(maxima["token/tv"], tokens)
    values["probs_pearson_corr"] = _pearson(totals)
    values["zero_prob_fraction"] = _ratio(tokens - finite, tokens)
    values["exact_zero_rollout_fraction"] = _ratio(totals["token/zero_rollout"], tokens)
    values["exact_zero_training_fraction"] = _ratio(totals["token/zero_train"], tokens)


def _pearson(totals: dict[str, float]) -> float:
    """The correlation of the probabilities, from moments about each bin's centre; 0 where one side does not vary."""
    n = totals["token/n"]
    if not n:
        return 0.0
    bins = [
        (
            totals[f"prob/{label}/n"],
            centre,
            *(totals[f"moment/{label}/{name}"] for name in ("p", "q", "pp", "qq", "pq")),
        )
        for label, centre in zip(PROBABILITY_BINS, PROBABILITY_CENTRES, strict=True)
    ]
    mean_p = math.fsum(count * centre + p for count, centre, p, *_ in bins) / n
    mean_q = math.fsum(count * centre + q for count, centre, _, q, *_ in bins) / n
    var_p = var_q = covariance = size_p = size_q = 0.0
    for count, centre, p, q, pp, qq, pq in bins:
        off_p, off_q = centre - mean_p, centre - mean_q
        var_p += pp + 2 * off_p * p + count * off_p * off_p
        var_q += qq + 2 * off_q * q + count * off_q * off_q
        covariance += pq + off_q * p + off_p * q + count * off_p * off_q
        size_p, size_q = size_p + pp + count * off_p * off_p, size_q + qq + count * off_q * off_q
    # Below this share of the moments that it comes from, a variance is so rounded that its cut would show in 1e-9.
    if var_p <= 1e-7 * size_p or var_q <= 1e-7 * size_q:
        return 0.0
    return min(max(covariance / math.sqrt(var_p * var_q), -1.0), 1.0)


def _rejection(totals: dict[str, float], maxima: dict[str, float], values: dict[str, float]) -> None:
    tokens, seqs = totals["all/tokens"], totals["all/seqs"]
    values["invalid_seq_fraction"] = _ratio(totals["all/invalid_seqs"], seqs)
    values["rollout_rs_masked_fraction"] = _ratio(totals["all/rejected_tokens"], tokens)
    values["rollout_rs_seq_masked_fraction"] = _ratio(totals["all/touched_seqs"], seqs)
    values["rollout_rs_seq_dropped_fraction"] = _ratio(totals["all/dropped_seqs"], seqs)
    names = [name.split("/")[1] for name in totals if name.startswith("criterion/") and name.endswith("/n")]
    for name in names:
        group, metric = f"criterion/{name}", f"rollout_rs_{name}"
        count = totals[f"{group}/n"]
        values[f"{metric}_mean"] = _ratio(totals[f"{group}/total"], count)
        values[f"{metric}_max"] = _extreme(maxima[f"{group}/max"], count)
        values[f"{metric}_min"] = _extreme(-maxima[f"{group}/negated_min"], count)
        values[f"{metric}_masked_fraction"] = _ratio(totals[f"{group}/tokens"], tokens)
        values[f"{metric}_seq_masked_fraction"] = _ratio(totals[f"{group}/seqs"], seqs)


def _weights(totals: dict[str, float], maxima: dict[str, float], values: dict[str, float]) -> None:
    count, square = totals["weight/n"], totals["weight/square"]
    off_one = _ratio(totals["weight/off_one"], count)
    about_one = _ratio(totals["weight/off_one_square"], count)
    # What the two moments round to is no variance, and would depend on how the batch was cut.
    variance = about_one - off_one**2 if about_one - off_one**2 > 1e-13 * about_one else 0.0
    values["rollout_is_mean"] = _ratio(totals["weight/total"], count)
    values["rollout_is_std"] = math.sqrt(variance)
    values["rollout_is_min"] = _extreme(-maxima["weight/negated_min"], count)
    values["rollout_is_max"] = _extreme(maxima["weight/max"], count)
    values["rollout_is_raw_mean"] = _ratio(totals["weight/raw"], count)
    values["rollout_is_raw_min"] = _extreme(-maxima["weight/negated_raw_min"], count)
    values["rollout_is_raw_max"] = _extreme(maxima["weight/raw_max"], count)
    size = totals["weight/total"] ** 2 / (count * square) if count and square else 0.0
    values["rollout_is_eff_sample_size"] = min(size, 1.0)
    values["rollout_is_ratio_fraction_high"] = _ratio(totals["weight/high"], count)
    values["rollout_is_ratio_fraction_low"] = _ratio(totals["weight/low"], count)


def _bin(metric: str, group: str, totals: dict[str, float], values: dict[str, float]) -> None:
    count = totals[f"{group}/n"]
    values[f"{metric}/fraction"] = _ratio(count, totals["token/n"])
    values[f"{metric}/kl"] = _ratio(totals[f"{group}/kl"], totals[f"{group}/finite"])
    values[f"{metric}/abs_log_ratio"] = _ratio(totals[f"{group}/abs"], totals[f"{group}/finite"])
    values[f"{metric}/k3_kl"] = _ratio(totals[f"{group}/k3"], count)
    values[f"{metric}/prob_diff"] = _ratio(totals[f"{group}/tv"], count)
