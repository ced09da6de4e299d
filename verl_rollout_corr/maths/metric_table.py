"""The table that names and explains every metric; `metrics.py` gives the values, and a test holds the two together."""

from __future__ import annotations

from dataclasses import dataclass

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
        "rollout_rs_lag_unknown_fraction",
        "valid sequences of unknown lag / valid sequences",
        "[0, 1]",
        "what the criterion lag lets pass without knowing",
        "this package",
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
