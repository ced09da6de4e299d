"""The oracle itself, on cases small enough to do on paper."""

from __future__ import annotations

import math

import pytest

import oracle
from oracle.tokens import bernoulli_kl, exp_ratio, statistic

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
