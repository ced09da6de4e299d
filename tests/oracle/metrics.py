"""The metrics, straight from their formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from oracle.decisions import Decided
from oracle.tokens import INF, Row, exp_ratio, mean, statistic, total


def low(values: Sequence[float]) -> float:
    return min(values) if values else 0.0


def high(values: Sequence[float]) -> float:
    return max(values) if values else 0.0


def share(count: int, of: int) -> float:
    return count / of if of else 0.0


def mismatch(rows: list[Row]) -> dict[str, float]:
    """Of the two policies, over the valid rows."""
    tokens = [(p, q) for row in rows for p, q in zip(row.train, row.rollout, strict=True)]
    log_ratios = [x for row in rows for x in row.l]
    finite = [x for x in log_ratios if x != -INF]
    a, b, products = [], [], []
    for row in rows:
        if row.positions:
            products.append(exp_ratio(total(row.l)))
        seen = [i for i, x in enumerate(row.l) if x != -INF]
        if seen:
            a.append(mean([row.train[i] for i in seen]))
            b.append(mean([row.rollout[i] for i in seen]))
    d = [y - x for x, y in zip(a, b, strict=True)]
    prob_diff = [statistic("tv", p, q) for p, q in tokens]
    return {
        "kl": mean([-x for x in finite]),
        "k3_kl": mean([statistic("k3", p, q) for p, q in tokens]),
        "training_log_ppl": mean([-x for x in a]),
        "rollout_log_ppl": mean([-x for x in b]),
        "training_ppl": mean([exp_ratio(-x) for x in a]),
        "rollout_ppl": mean([exp_ratio(-x) for x in b]),
        "log_ppl_diff": mean(d),
        "log_ppl_abs_diff": mean([abs(x) for x in d]),
        "log_ppl_diff_max": high(d),
        "log_ppl_diff_min": low(d),
        "ppl_ratio": mean([exp_ratio(x) for x in d]),
        "chi2_token": mean([exp_ratio(x) ** 2 for x in log_ratios]) - 1 if log_ratios else 0.0,
        "chi2_seq": mean([x * x for x in products]) - 1 if products else 0.0,
        "zero_prob_fraction": share(len(log_ratios) - len(finite), len(log_ratios)),
        "prob_diff_mean": mean(prob_diff),
        "prob_diff_max": high(prob_diff),
    }


def of_weights(decided: Decided, weights: Mapping[str, Any]) -> dict[str, float]:
    """Of the applied and the raw weights, over the units of the level."""
    applied, raw = decided.applied, decided.raw
    mu = mean(applied)
    squares = math.fsum(w * w for w in applied)
    lower, upper = weights.get("lower"), weights.get("upper")
    out = {
        "mean": mu,
        "std": math.sqrt(mean([(w - mu) ** 2 for w in applied])),
        "min": low(applied),
        "max": high(applied),
        "raw_mean": mean(raw),
        "raw_max": high(raw),
        "raw_min": low(raw),
        "eff_sample_size": math.fsum(applied) ** 2 / (len(applied) * squares) if squares else 0.0,
    }
    if upper is not None:
        out["ratio_fraction_high"] = share(sum(w > upper for w in raw), len(raw))
    if lower is not None:
        out["ratio_fraction_low"] = share(sum(w < lower for w in raw), len(raw))
    return {f"rollout_is_{name}": value for name, value in out.items()}


def of_rejection(decided: Decided) -> dict[str, float]:
    """Of keep, and of every criterion. Invalid rows count in the denominators."""
    n = sum(len(kept) for kept in decided.keep)
    s = sum(bool(kept) for kept in decided.keep)
    out = {
        "rollout_rs_masked_fraction": share(sum(not k for kept in decided.keep for k in kept), n),
        "rollout_rs_seq_masked_fraction": share(sum(not all(kept) for kept in decided.keep if kept), s),
        "rollout_rs_seq_dropped_fraction": share(sum(not any(kept) for kept in decided.keep if kept), s),
        "invalid_seq_fraction": share(sum(row.invalid for row in decided.rows), s),
    }
    for name, judgement in decided.judgements.items():
        rejected = judgement.rejected
        out |= {
            f"rollout_rs_{name}_mean": mean(judgement.values),
            f"rollout_rs_{name}_max": high(judgement.values),
            f"rollout_rs_{name}_min": low(judgement.lowest),
            f"rollout_rs_{name}_masked_fraction": share(sum(x for row in rejected for x in row), n),
            f"rollout_rs_{name}_seq_masked_fraction": share(sum(any(row) for row in rejected), s),
        }
    if "lag" in decided.judgements:
        seen = [row for row in decided.valid if row.positions]
        out["rollout_rs_lag_unknown_fraction"] = share(sum(row.lag < 0 for row in seen), len(seen))
    return out


def metrics(decided: Decided, config: Mapping[str, Any]) -> dict[str, float]:
    """Every metric that the oracle knows, without the `rollout_corr/` in front."""
    out = mismatch(decided.valid) | of_rejection(decided)
    if decided.token_weights is not None:
        out |= of_weights(decided, config["weights"])
    return out
