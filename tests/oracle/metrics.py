"""The metrics, straight from their formulas."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from oracle.decisions import Decided
from oracle.tokens import INF, Row, exp_ratio, mean, statistic, total

Token = tuple[float, float]
"""log pi_train and log mu, or two ends of a bin."""

# Ends of the bins: of a probability up to but without the second, of whole numbers with it.
PROBABILITY = {
    "by_prob/0_0.01": (0.0, 0.01),
    "by_prob/0.01_0.1": (0.01, 0.1),
    "by_prob/0.1_0.5": (0.1, 0.5),
    "by_prob/0.5_0.9": (0.5, 0.9),
    "by_prob/0.9_1": (0.9, INF),
}
POSITION = {
    "by_position/0_15": (0, 15),
    "by_position/16_63": (16, 63),
    "by_position/64_255": (64, 255),
    "by_position/256_1023": (256, 1023),
    "by_position/1024_4095": (1024, 4095),
    "by_position/4096_16383": (4096, 16383),
    "by_position/16384_up": (16384, INF),
}
LAG = {
    "by_staleness/unknown": (-INF, -1),
    "by_staleness/lag_0": (0, 0),
    "by_staleness/lag_1": (1, 1),
    "by_staleness/lag_2": (2, 2),
    "by_staleness/lag_3_4": (3, 4),
    "by_staleness/lag_5_8": (5, 8),
    "by_staleness/lag_9_up": (9, INF),
}


def low(values: Sequence[float]) -> float:
    return min(values) if values else 0.0


def high(values: Sequence[float]) -> float:
    return max(values) if values else 0.0


def share(count: int, of: int) -> float:
    return count / of if of else 0.0


def mean_k3(tokens: Sequence[Token]) -> float:
    return mean([statistic("k3", p, q) for p, q in tokens])


def tokens_of(rows: Sequence[Row]) -> list[Token]:
    return [(p, q) for row in rows for p, q in zip(row.train, row.rollout, strict=True)]


def mismatch(rows: list[Row]) -> dict[str, float]:
    """Of the two policies, over the valid rows."""
    tokens = tokens_of(rows)
    log_ratios = [x for row in rows for x in row.l]
    finite = [x for x in log_ratios if x != -INF]
    prob_diff = [statistic("tv", p, q) for p, q in tokens]
    return {
        "kl": mean([-x for x in finite]),
        "k3_kl": mean_k3(tokens),
        "chi2_token": mean([exp_ratio(x) ** 2 for x in log_ratios]) - 1 if log_ratios else 0.0,
        "abs_ratio_diff": mean([statistic("abs", p, q) for p, q in tokens]),
        "zero_prob_fraction": share(len(log_ratios) - len(finite), len(log_ratios)),
        "prob_diff_mean": mean(prob_diff),
        "prob_diff_max": high(prob_diff),
        "probs_pearson_corr": correlation([(math.exp(p), math.exp(q)) for p, q in tokens]),
        "exact_zero_rollout_fraction": share(sum(q == 0 and p < -1e-3 for p, q in tokens), len(tokens)),
        "exact_zero_train_fraction": share(sum(p == 0 and q < -1e-3 for p, q in tokens), len(tokens)),
        "noise_floor_k3_kl": mean_k3(tokens_of([row for row in rows if row.lag == 0])),
    }


def of_sequences(rows: list[Row]) -> dict[str, float]:
    """Of the valid rows with a response token."""
    a, b, products = [], [], []
    for row in rows:
        if row.positions:
            products.append(exp_ratio(total(row.l)))
        seen = [i for i, x in enumerate(row.l) if x != -INF]
        if seen:
            a.append(mean([row.train[i] for i in seen]))
            b.append(mean([row.rollout[i] for i in seen]))
    d = [y - x for x, y in zip(a, b, strict=True)]
    constant = [len(row.l) >= 8 and len(set(row.rollout)) == 1 < len(set(row.train)) for row in rows]
    return {
        "training_log_ppl": mean([-x for x in a]),
        "rollout_log_ppl": mean([-x for x in b]),
        "training_ppl": mean([exp_ratio(-x) for x in a]),
        "rollout_ppl": mean([exp_ratio(-x) for x in b]),
        "log_ppl_diff": mean(d),
        "log_ppl_abs_diff": mean([abs(x) for x in d]),
        "log_ppl_diff_max": high(d),
        "log_ppl_diff_min": low(d),
        "ppl_ratio": mean([exp_ratio(x) for x in d]),
        "chi2_seq": mean([x * x for x in products]) - 1 if products else 0.0,
        "constant_rollout_row_fraction": share(sum(constant), len(products)),
    }


def correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Pearson's, from deviations about the means; NaN where a side varies too little for a definite answer.

    It is asked of moments about 0 for tokens that the engine gives less than a half and about 1 for the others: less
    than 1e-6 of these is not far enough from the 1e-7 below which a side counts as constant. About 1, a probability is
    itself rounded.
    """
    if not pairs:
        return 0.0
    centres = [float(q >= 0.5) for _, q in pairs]
    means, spreads = [], []
    for side in zip(*pairs, strict=True):
        middle = math.fsum(side) / len(side)
        means.append(middle)
        spreads.append(math.fsum((v - middle) ** 2 for v in side))
        size = math.fsum((v - c) ** 2 + (c - middle) ** 2 for v, c in zip(side, centres, strict=True))
        if spreads[-1] <= max(1e-6 * size, 1e-24 * sum(centres)):
            return math.nan
    together = math.fsum((p - means[0]) * (q - means[1]) for p, q in pairs)
    return together / math.sqrt(spreads[0] * spreads[1])


def quantiles(log_ratios: list[float]) -> dict[str, float]:
    """By counting in bins whose edges are 2^k (1 + j/8), k = -19 .. 4, and 32, on both sides of 0."""
    edges = [math.ldexp(1 + j / 8, k) for k in range(-19, 5) for j in range(8)] + [32.0]
    found = {f"log_ratio_p{q:02d}": quantile([place(x, edges) for x in log_ratios], q) for q in (1, 50, 99)}
    sizes = [place(abs(x), edges) for x in log_ratios]
    return found | {f"abs_log_ratio_p{q}": quantile(sizes, q) for q in (50, 90, 99)}


def place(x: float, edges: list[float]) -> Token:
    """Both ends of the bin of x."""
    if math.isinf(x):
        return x, x
    reached = bisect.bisect_right(edges, abs(x))
    ends = (0.0, 0.0) if not reached else (edges[reached - 1], edges[min(reached, len(edges) - 1)])
    return ends if x > 0 else (-ends[1] + 0.0, -ends[0] + 0.0)


def quantile(bins: list[Token], percent: int) -> float:
    """The point below which so many percent lie, if the values of a bin lie evenly in it."""
    before = 0
    for (lower, upper), count in sorted(Counter(bins).items()):
        if 100 * (before + count) >= percent * len(bins):
            part = Fraction(percent * len(bins) - 100 * before, 100 * count)
            return lower if lower == upper else lower + (upper - lower) * float(part)
        before += count
    return 0.0


def in_bins(rows: list[Row]) -> dict[str, float]:
    """The mismatch of the tokens of each bin."""
    bins: dict[str, list[Token]] = {name: [] for name in (*PROBABILITY, *POSITION, *LAG)}
    for row in rows:
        lag = next(name for name, (first, last) in LAG.items() if first <= row.lag <= last)
        for i, (p, q) in enumerate(zip(row.train, row.rollout, strict=True)):
            chance = math.exp(q)
            bins[next(name for name, (a, b) in PROBABILITY.items() if a <= chance < b)].append((p, q))
            bins[next(name for name, (first, last) in POSITION.items() if first <= i <= last)].append((p, q))
            bins[lag].append((p, q))
    out: dict[str, float] = {}
    for name, tokens in bins.items():
        finite = [p - q for p, q in tokens if p != -INF]
        out |= {
            f"{name}/fraction": share(len(tokens), sum(len(row.l) for row in rows)),
            f"{name}/kl": mean([-x for x in finite]),
            f"{name}/abs_log_ratio": mean([abs(x) for x in finite]),
            f"{name}/k3_kl": mean_k3(tokens),
            f"{name}/prob_diff": mean([statistic("tv", p, q) for p, q in tokens]),
        }
    return out


def of_weights(decided: Decided, weights: Mapping[str, Any]) -> dict[str, float]:
    """Of the applied and the raw weights, over the units of the level."""
    applied, raw = decided.applied, decided.raw
    mu = mean(applied)
    squares = math.fsum(w * w for w in applied)
    lower, upper = weights.get("lower"), weights.get("upper")
    out = {
        "ratio_fraction_high": share(sum(upper is not None and w > upper for w in raw), len(raw)),
        "ratio_fraction_low": share(sum(lower is not None and w < lower for w in raw), len(raw)),
        "mean": mu,
        "std": math.sqrt(mean([(w - mu) ** 2 for w in applied])),
        "min": low(applied),
        "max": high(applied),
        "raw_mean": mean(raw),
        "raw_max": high(raw),
        "raw_min": low(raw),
        "eff_sample_size": math.fsum(applied) ** 2 / (len(applied) * squares) if squares else 0.0,
    }
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
    """Every metric of a batch, without the `rollout_corr/` in front."""
    rows = decided.valid
    out = mismatch(rows) | of_sequences(rows) | quantiles([x for row in rows for x in row.l]) | of_rejection(decided)
    if decided.token_weights is not None:
        out |= of_weights(decided, config["weights"])
    return out | (in_bins(rows) if config.get("metrics", "all") == "all" else {})
