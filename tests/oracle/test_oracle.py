"""The oracle itself, on cases small enough to do on paper."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import oracle
from oracle.batches import LEVELS, NAMES, Batch
from oracle.batches import STATS as STAT_WORDS
from oracle.compare import PREFIX, assert_metrics_equal, expected
from oracle.tokens import bernoulli_kl, exp_ratio, statistic
from verl_rollout_corr import Sums, finalize
from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.grammar import CRITERION_NAMES, STATS, Level, Stat
from verl_rollout_corr.maths import metrics
from verl_rollout_corr.maths.correction import correct
from verl_rollout_corr.maths.metrics import METRICS, Metric
from verl_rollout_corr.maths.statistics import STATISTICS
from verl_rollout_corr.maths.sum_table import layout

NAN = math.nan


def test_two_tokens_on_paper() -> None:
    """Ratios 2 and 1/4 beside a hole that holds NaN."""
    train, rollout = [[math.log(0.5), NAN, math.log(0.1)]], [[math.log(0.25), NAN, math.log(0.4)]]
    config = {"weights": {"level": "prefix_sum", "upper": 1.5}, "reject": {"seq_max_k1": {"lower": 0.3}}}
    decided = oracle.decide(train, rollout, [[1, 0, 1]], config)
    assert decided.padded("weights")[0] == pytest.approx([1.5, 0.0, 0.5])
    assert decided.padded("keep") == [[0.0, 0.0, 0.0]]
    found = oracle.metrics(decided, config)
    assert found["kl"] == pytest.approx(math.log(2) / 2)
    assert found["chi2_token"] == pytest.approx((4 + 1 / 16) / 2 - 1)
    assert found["rollout_is_raw_max"] == pytest.approx(2.0)
    assert found["rollout_is_eff_sample_size"] == pytest.approx(2.0**2 / (2 * 2.5))
    assert found["rollout_is_ratio_fraction_high"] == 0.5
    assert found["rollout_rs_seq_max_k1_max"] == pytest.approx(2.0)


def test_turns_are_runs_of_the_mask() -> None:
    """A hole ends a turn; the geometric mean is per turn."""
    l = [0.2, 0.4, 0.0, 1.0]  # noqa: E741 - the letter of the formulas
    config = {"weights": {"level": "turn_mean"}, "reject": {"turn_sum_k1": {"upper": math.exp(0.7)}}}
    decided = oracle.decide([[x - 2 for x in l]], [[-2.0] * 4], [[1, 1, 0, 1]], config)
    assert decided.padded("weights")[0] == pytest.approx([math.exp(0.3), math.exp(0.3), 0.0, math.exp(1.0)])
    assert decided.padded("keep") == [[1.0, 1.0, 0.0, 0.0]]


def test_batch_mean_drops_the_largest_first() -> None:
    """k2 of .5, .02, .005 (mean .175); without the first the mean is .0125."""
    config = {"reject": {"batch_mean_k2": {"upper": 0.0126}}}
    decided = oracle.decide([[-2.0, -2.8], [-2.9, 0.0]], [[-3.0, -3.0], [-3.0, 0.0]], [[1, 1], [1, 0]], config)
    assert decided.padded("keep") == [[0.0, 1.0], [1.0, 0.0]]


def test_statistics_at_their_edges() -> None:
    """Infinities, tiny and absurd log-ratios."""
    assert statistic("k3", -math.inf, -1.0) == math.inf
    assert statistic("abs", -math.inf, -1.0) == 1.0
    assert statistic("k3", -1.0 + 2**-20, -1.0) == pytest.approx(2**-41, rel=1e-6)
    assert statistic("k3", -1e9, 0.0) == pytest.approx(1e9)
    assert bernoulli_kl(math.log(0.5), math.log(0.25)) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert bernoulli_kl(0.0, 0.0) == bernoulli_kl(-math.inf, -math.inf) == 0.0
    floor = 2.0**-24  # of the complement of a certain token
    assert bernoulli_kl(0.0, -1e4) == pytest.approx(1e4 + floor * math.log(floor))
    assert bernoulli_kl(-2e-7, 0.0) == pytest.approx(-2e-7 + 2e-7 * math.log(2e-7 / floor), rel=1e-5)
    assert bernoulli_kl(math.log(0.5), -math.inf) == math.inf
    assert exp_ratio(1e4) == math.exp(20)


def test_invalid_is_refused() -> None:
    """The four ways to be invalid, at a response token and elsewhere."""
    for train, rollout in ((NAN, -1.0), (-1.0, -math.inf), (math.inf, -1.0), (-1.0, 0.01)):
        with pytest.raises(oracle.InvalidInputError):
            oracle.decide([[train]], [[rollout]], [[1]], {})
        assert oracle.decide([[train]], [[rollout]], [[0]], {}).padded("keep") == [[0.0]]


def test_the_oracle_has_the_grammars_words() -> None:
    """A statistic, a level or a criterion on one side only would be checked by nothing."""
    assert set(STAT_WORDS) == {str(stat) for stat in Stat if not STATS[stat].per_row}
    assert set(LEVELS) == {str(level) for level in Level}
    assert set(NAMES) == set(CRITERION_NAMES)


def everything() -> dict[str, Any]:
    """Every statistic, a veto and the lag, and weights."""
    reject: dict[str, Any] = {f"seq_mean_{stat}": {"upper": 0.3} for stat in STAT_WORDS}
    reject |= {"seq_max_k1": {"lower": 0.5}, "turn_sum_k1": {"upper": 2.0}, "lag": {"upper": 1}}
    weights = {"level": "token", "lower": 0.99, "upper": 1.01}
    return {"reject": reject, "weights": weights, "invalid": "reject", "min_group_kept": 1}


def a_batch_in_which_everything_happens(nothing: float) -> Batch:
    """Probability 0 (or what is given instead), exact zeros, a constant and an invalid row, lags, every kind of bin."""
    rng = np.random.default_rng(5)
    rows, width = 12, 90
    rollout = -rng.exponential(1.0, (rows, width))
    rollout[:, ::7] = -7.0
    train = np.minimum(rollout + rng.normal(-0.02, 0.3, rollout.shape), 0.0)
    train[0, 3], rollout[1, 4:9], train[2, 5], rollout[3] = nothing, 0.0, 0.0, -1.5
    rollout[4, 2] = -9999.0
    mask = np.ones((rows, width), dtype=bool)
    mask[5, 20:] = mask[6] = False
    lags = [0, 0, 0, 1, 1, 2, 3, 4, 5, 9, -1, -1]
    return Batch(
        *(torch.from_numpy(column) for column in (train, rollout, mask)),
        torch.from_numpy(rng.normal(size=rows)),
        [i // 2 for i in range(rows)],
        lags,
    )


@cache
def wanted(nothing: float) -> dict[str, float]:
    """The oracle's metrics of that batch."""
    return oracle.metrics(expected(a_batch_in_which_everything_happens(nothing), everything()), everything())


def compare() -> None:
    """The package with the oracle; without an infinity too, since three times infinity is infinity."""
    for nothing in (-math.inf, -9.0):
        batch = a_batch_in_which_everything_happens(nothing)
        found = correct(batch.train, batch.rollout, batch.mask, parse(everything()), **batch.optional)
        assert_metrics_equal(found.metrics, wanted(nothing))


def test_the_oracle_has_every_metric_of_the_table() -> None:
    """And the other way round: a row without a second implementation would be checked by nothing."""
    names = {PREFIX + name for name in wanted(-math.inf)}
    assert names == finalize(Sums.zero(parse(everything()))).keys()
    labels = layout(parse(everything())).labels
    assert names == {row.at(label) for row in METRICS for label in labels(row.family)}
    compare()


@pytest.mark.parametrize("row", [row for row in METRICS if row.formula is not None], ids=lambda row: row.name)
def test_a_metric_that_is_wrong_is_noticed(row: Metric, monkeypatch: pytest.MonkeyPatch) -> None:
    """A formula that is off by a factor of 3 differs from the oracle on one batch: each row is really compared."""
    wrong = replace(row, formula=lambda *values: 3 * row.formula(*values))
    monkeypatch.setattr(metrics, "METRICS", tuple(wrong if other is row else other for other in METRICS))
    metrics._plan.cache_clear()  # the formulas of a layout are looked up once
    with pytest.raises(AssertionError, match="the oracle says"):
        compare()


@pytest.fixture(autouse=True)
def _formulas_are_looked_up_again() -> Iterator[None]:
    yield
    metrics._plan.cache_clear()


@pytest.mark.parametrize("stat", [stat for stat in Stat if not STATS[stat].per_row], ids=str)
def test_a_statistic_that_is_wrong_is_noticed(stat: Stat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off by a millionth."""
    right = STATISTICS[stat]
    monkeypatch.setitem(STATISTICS, stat, lambda tokens: right(tokens) * (1 + 1e-6))
    with pytest.raises(AssertionError, match="the oracle says"):
        compare()
