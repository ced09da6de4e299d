"""Metrics: the table names what is emitted and nothing else, and each value is what its row says."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from verl_rollout_corr import correct, finalize
from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.grammar import CRITERION_NAMES, LEVELS, STATS, Scope, criterion_words
from verl_rollout_corr.maths.bins import BIN_NAMES
from verl_rollout_corr.maths.metrics import METRICS, PREFIX, fresh_k3, staleness_share
from verl_rollout_corr.maths.sums import Sums

# What the trainer and the workers add in a run of verl; tests/hooks look at these.
BY_THE_HOOK = {"staleness_share", "applied_kept_fraction", "applied_weight", "applied_clipped_fraction"}


def everything() -> dict[str, Any]:
    """All criteria, and weights."""
    reject: dict[str, dict[str, float]] = {}
    for name in CRITERION_NAMES:
        scope, _, stat = criterion_words(name)
        if STATS[stat].per_row:
            reject[name] = {"upper": 1}
            continue
        two_sided = STATS[stat].two_sided and scope is not Scope.BATCH
        reject[name] = {"lower": 0.5, "upper": 2.0} if two_sided else {"upper": 0.5}
    return {"reject": reject, "weights": {"level": "seq_sum", "lower": 0.5, "upper": 2.0}}


def described() -> set[str]:
    """Every name that the table stands for."""
    return {
        PREFIX + row.name.format(name=name, bin=bin_)
        for row in METRICS
        for name in (CRITERION_NAMES if "{name}" in row.name else [""])
        for bin_ in (BIN_NAMES if "{bin}" in row.name else [""])
    }


def ask(log_ratios: list[list[float]], config: dict[str, Any] | None = None, base: float = -3.0, **more: Any) -> Any:
    """`correct` on rows of these log-ratios, with log mu at `base`."""
    length = max(map(len, log_ratios))
    padded = torch.tensor([row + [0.0] * (length - len(row)) for row in log_ratios], dtype=torch.float64)
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in log_ratios])
    rollout = torch.full_like(padded, base)
    return correct(rollout + padded, rollout, mask, config or {}, **more)


def test_every_metric_is_described() -> None:
    """And every description is of a metric, or of one that the hook adds."""
    emitted = set(finalize(Sums.zero(parse(everything()))))
    assert emitted - described() == set()
    assert described() - emitted == {PREFIX + name for name in BY_THE_HOOK}


def test_every_row_says_what_it_is() -> None:
    """A name once, a formula and a range each."""
    names = [row.name for row in METRICS]
    assert len(names) == len(set(names))
    for row in METRICS:
        assert row.definition, row.name
        assert row.meaning and row.source, row.name
        assert bool(row.sums) == (row.formula is not None), row.name
        assert re.fullmatch(r"[\[(]-?(\d|inf|e).*, .*[\])]|as the statistic", row.range), row.name


@pytest.mark.parametrize("level", [None, *LEVELS])
def test_weights_alone_decide_on_their_metrics(level: str | None) -> None:
    """Without weights there are none of theirs, and no criterion has any that was not asked for."""
    names = finalize(Sums.zero(parse({"weights": {"level": level and str(level)}})))
    assert any(name.startswith(f"{PREFIX}rollout_is_") for name in names) == (level is not None)
    assert {name for name in names if "rollout_rs_" in name} == {
        f"{PREFIX}rollout_rs_{name}" for name in ("masked_fraction", "seq_masked_fraction", "seq_dropped_fraction")
    }


def test_a_metric_over_nothing_is_zero() -> None:
    """Every one, and finite."""
    assert set(finalize(Sums.zero(parse(everything()))).values()) == {0.0}


def test_by_hand() -> None:
    """Two rows, r = (2, 1/2) and r = 4 at mu = e^-3: per-sequence values are means of rows, not of tokens."""
    l2, l4 = math.log(2), math.log(4)
    found = ask([[l2, -l2], [l4]]).metrics
    want = {
        "kl": -(l2 - l2 + l4) / 3,
        "k3_kl": ((2 - 1 - l2) + (0.5 - 1 + l2) + (4 - 1 - l4)) / 3,
        "training_log_ppl": (3 + 3 - l4) / 2,
        "rollout_log_ppl": 3,
        "training_ppl": (math.exp(3) + math.exp(3 - l4)) / 2,
        "rollout_ppl": math.exp(3),
        "log_ppl_diff": (0 - l4) / 2,
        "log_ppl_abs_diff": l4 / 2,
        "log_ppl_diff_max": 0.0,
        "log_ppl_diff_min": -l4,
        "ppl_ratio": (1 + 1 / 4) / 2,
        "chi2_token": (4 + 1 / 4 + 16) / 3 - 1,
        "chi2_seq": (1 + 16) / 2 - 1,
        "abs_ratio_diff": (1 + 1 / 2 + 3) / 3,
        "prob_diff_mean": math.exp(-3) * (1 + 1 / 2 + 3) / 3,
        "prob_diff_max": math.exp(-3) * 3,
        "probs_pearson_corr": 0.0,  # mu does not vary
        "by_position/0_15/fraction": 1.0,
        "by_prob/0.01_0.1/fraction": 1.0,
        "by_prob/0.01_0.1/abs_log_ratio": (l2 + l2 + l4) / 3,
        "by_staleness/unknown/k3_kl": found[f"{PREFIX}k3_kl"],
    }
    assert {name: found[PREFIX + name] for name in want} == pytest.approx(want, rel=1e-12, abs=1e-15)


def test_weights_by_hand() -> None:
    """r = 4, 1, 1/4, 1/8 truncated into [1/2, 2]: applied and raw, both named."""
    found = ask(
        [[math.log(r)] for r in (4, 1, 1 / 4, 1 / 8)], {"weights": {"level": "token", "lower": 0.5, "upper": 2}}
    )
    want = {
        "mean": 4 / 4,
        "std": math.sqrt((1 + 0 + 1 / 4 + 1 / 4) / 4),
        "min": 0.5,
        "max": 2.0,
        "raw_mean": (4 + 1 + 3 / 8) / 4,
        "raw_min": 1 / 8,
        "raw_max": 4.0,
        "eff_sample_size": 16 / (4 * (4 + 1 + 1 / 2)),
        "ratio_fraction_high": 1 / 4,
        "ratio_fraction_low": 2 / 4,
    }
    assert {name: found.metrics[f"{PREFIX}rollout_is_{name}"] for name in want} == pytest.approx(want, rel=1e-12)


def test_the_correlation_of_the_probabilities() -> None:
    """numpy's, over tokens of every bin; rare tokens whose probabilities vary by 1e-9 included."""
    generator = torch.Generator().manual_seed(0)
    for scale in (1.0, 1e-9):
        rollout = (torch.rand(1, 500, generator=generator, dtype=torch.float64) * scale).log()
        train = torch.minimum(
            rollout + 0.3 * torch.randn(1, 500, generator=generator, dtype=torch.float64), rollout * 0
        )
        want = torch.corrcoef(torch.stack([train.exp()[0], rollout.exp()[0]]))[0, 1]
        found = correct(train, rollout, torch.ones(1, 500), {}).metrics[f"{PREFIX}probs_pearson_corr"]
        assert found == pytest.approx(float(want), rel=1e-6)


def test_the_share_of_staleness() -> None:
    """k3 of .035 in a stale row, of which the engine alone makes .005, beside .005 in a fresh one: .03 of .04."""
    fresh, stale = math.sqrt(2 * 0.005), math.sqrt(2 * 0.035)
    rows = ask([[fresh], [stale]], staleness=torch.tensor([0, 1]))
    floor = fresh_k3(rows.sums)
    assert floor == rows.metrics[f"{PREFIX}noise_floor_k3_kl"] == rows.metrics[f"{PREFIX}by_staleness/lag_0/k3_kl"]
    assert floor == pytest.approx(0.005, rel=0.05)
    assert staleness_share(rows.sums, floor) == pytest.approx(0.75, rel=0.05)
    assert staleness_share(rows.sums, None) == 0.0  # no row of lag 0 to compare with
    assert staleness_share(rows.sums, 1.0) == 0.0  # the stale rows are no worse
    assert staleness_share(ask([[0.0]]).sums, 0.005) == 0.0
    for lags in ([0, 0], [-1, -1], None):
        staleness = None if lags is None else torch.tensor(lags)
        assert staleness_share(ask([[fresh], [stale]], staleness=staleness).sums, 0.0) == 0.0
    assert fresh_k3(ask([[fresh]]).sums) is None


@pytest.mark.parametrize("word", ["all", "core"])
def test_core_keeps_what_staleness_is_computed_from(word: str) -> None:
    """The noise floor and the share are the same without bins."""
    rows = ask([[0.1], [0.3]], {"metrics": word}, staleness=torch.tensor([0, 2]))
    assert rows.metrics[f"{PREFIX}noise_floor_k3_kl"] == pytest.approx(math.expm1(0.1) - 0.1, rel=1e-12)
    assert staleness_share(rows.sums, 0.0) == pytest.approx(
        (math.expm1(0.3) - 0.3) / (math.expm1(0.3) - 0.3 + math.expm1(0.1) - 0.1), rel=1e-12
    )


def test_core_is_all_without_the_bins() -> None:
    """The same values under the same names."""
    rows, lags = [[0.1, -2.0], [0.3]], torch.tensor([0, 1])
    every, core = (ask(rows, {**everything(), "metrics": w}, staleness=lags).metrics for w in ("all", "core"))
    assert core == {name: value for name, value in every.items() if not name.startswith(f"{PREFIX}by_")}


def test_infinite_statistics_do_not_spoil_the_rest() -> None:
    """A token of probability 0 under the trainer: k2 and k3 are +inf, everything else a number."""
    train, rollout = torch.tensor([[-math.inf, -1.0]]), torch.tensor([[-1.0, -1.1]])
    metrics = correct(train, rollout, torch.ones(1, 2), {"weights": {"level": "token"}}).metrics
    infinite = {name.removeprefix(PREFIX) for name, value in metrics.items() if math.isinf(value)}
    assert infinite == {
        "k3_kl",
        "by_prob/0.1_0.5/k3_kl",
        "by_position/0_15/k3_kl",
        "by_staleness/unknown/k3_kl",
        "log_ratio_p01",
        "log_ratio_p50",
        "abs_log_ratio_p90",
        "abs_log_ratio_p99",
    }
    assert not any(math.isnan(value) for value in metrics.values())
    for lags in ([0], [3]):
        again = correct(train, rollout, torch.ones(1, 2), {}, staleness=torch.tensor(lags)).sums
        assert math.isfinite(staleness_share(again, 0.0))
        assert fresh_k3(again) in (None, pytest.approx((math.expm1(0.1) - 0.1) / 2, rel=1e-5))
