"""Metrics: the one place where sums become values. `metric_table.py` says what each one is.

Nothing is averaged that is not an average: a value is computed once, from sums over the whole batch. A metric over
nothing is 0.
"""

from __future__ import annotations

import math

from verl_rollout_corr.maths.collection import POSITION_BINS, PROBABILITY_BINS, PROBABILITY_CENTRES, STALENESS_BINS
from verl_rollout_corr.maths.metric_table import PREFIX
from verl_rollout_corr.maths.sums import Sums

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
    if "criterion/lag/n" in totals:
        known, valid = totals["criterion/lag/n"], totals["seq/n"]
        values["rollout_rs_lag_unknown_fraction"] = _ratio(valid - known, valid)


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
