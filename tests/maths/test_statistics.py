"""The six statistics: by hand, as laws, at their limits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from verl_rollout_corr.grammar import STATS, Stat
from verl_rollout_corr.maths.log_ratio import TokenLogProbs, token_log_probs
from verl_rollout_corr.maths.statistics import STATISTICS, absolute, bkl, bkl_mu, k1, k2, k3, tv

log_probs = st.floats(-60, 0)
DISTANCES = [k2, k3, absolute, tv, bkl]


def pair(train: float, rollout: float) -> TokenLogProbs:
    """One token with these log-probs."""
    return TokenLogProbs(
        torch.tensor([[train]], dtype=torch.float64),
        torch.tensor([[rollout]], dtype=torch.float64),
        torch.ones(1, 1, dtype=torch.bool),
    )


def value(statistic: object, train: float, rollout: float) -> float:
    """What a statistic says of one token."""
    assert callable(statistic)
    found = statistic(pair(train, rollout))
    assert isinstance(found, Tensor)
    return float(found)


def test_the_registry_is_the_grammar() -> None:
    """A statistic of tokens is one row of the grammar and one function."""
    assert STATS.keys() == set(Stat)
    assert STATISTICS.keys() == {stat for stat, info in STATS.items() if not info.per_row}
    assert len(set(STATISTICS.values())) == len(STATISTICS)


@pytest.mark.parametrize("stat", STATISTICS, ids=str)
def test_outside_the_response_it_is_zero(stat: Stat) -> None:
    """Sums over a row or a batch are over all positions."""
    log_probs, mask = torch.tensor([[-1.0, math.nan, -2.0]]), torch.tensor([[True, False, False]])
    found = STATISTICS[stat](token_log_probs(log_probs, log_probs - 0.5, mask))
    assert found[0, 0] != 0
    assert found[0, 1:].tolist() == [0.0, 0.0]


def test_by_hand() -> None:
    """pi = 0.6, mu = 0.3: r = 2. The Bernoulli divergences are .1920 and .1838."""
    train, rollout = math.log(0.6), math.log(0.3)
    assert value(k1, train, rollout) == pytest.approx(math.log(2))
    assert value(k2, train, rollout) == pytest.approx(0.2402265070)
    assert value(k3, train, rollout) == pytest.approx(1 - math.log(2))
    assert value(absolute, train, rollout) == pytest.approx(1.0)
    assert value(tv, train, rollout) == pytest.approx(0.3)
    one = 0.6 * math.log(2) + 0.4 * math.log(0.4 / 0.7)
    other = 0.3 * math.log(0.5) + 0.7 * math.log(0.7 / 0.4)
    assert one > other
    assert value(bkl, train, rollout) == pytest.approx(one, rel=1e-12)
    assert value(bkl, rollout, train) == pytest.approx(one, rel=1e-12)
    assert value(bkl_mu, train, rollout) == pytest.approx(other, rel=1e-12)
    assert value(bkl_mu, rollout, train) == pytest.approx(one, rel=1e-12)


@pytest.mark.parametrize(("p", "q"), [(0.9, 0.1), (0.9, 1e-9), (0.99, 0.3), (1e-9, 0.5), (0.5, 0.4999)])
def test_bkl_by_hand_near_and_far(p: float, q: float) -> None:
    """The larger of the two Bernoulli divergences, on both sides of where the formula changes."""
    divergences = [a * math.log(a / b) + (1 - a) * (math.log1p(-a) - math.log1p(-b)) for a, b in ((p, q), (q, p))]
    assert value(bkl, math.log(p), math.log(q)) == pytest.approx(max(divergences), rel=1e-8)
    assert value(bkl_mu, math.log(p), math.log(q)) == pytest.approx(divergences[1], rel=1e-8)


@given(log_probs, log_probs)
def test_distances_are_not_negative(train: float, rollout: float) -> None:
    """And finite for finite log-probs below certainty."""
    for statistic in DISTANCES:
        found = value(statistic, train, rollout)
        assert found >= 0
        if train < 0 and rollout < 0:
            assert math.isfinite(found)


@given(log_probs)
def test_distances_of_a_policy_to_itself_are_zero(log_prob: float) -> None:
    """Exactly."""
    for statistic in [k1, *DISTANCES]:
        assert value(statistic, log_prob, log_prob) == 0.0


@given(log_probs, log_probs)
def test_symmetries(train: float, rollout: float) -> None:
    """k1 changes sign with the order of the policies; k2, tv and bkl do not see it."""
    assert value(k1, train, rollout) == -value(k1, rollout, train)
    for statistic in (k2, tv, bkl):
        assert value(statistic, train, rollout) == value(statistic, rollout, train)


@given(st.floats(-1e-2, 1e-2).filter(lambda x: abs(x) > 1e-12))
def test_tiny_log_ratios_keep_their_digits(x: float) -> None:
    """k3 = l^2/2 + l^3/6 + l^4/24 + l^5/120 up to 1e-13 of itself: nothing cancels, at the seam of the series too."""
    exact = float(k1(pair(x, 0.0)))
    series = exact**2 * (1 / 2 + exact * (1 / 6 + exact * (1 / 24 + exact * (1 / 120 + exact / 720))))
    assert value(k3, x, 0.0) == pytest.approx(series, rel=1e-12)


@pytest.mark.parametrize("x", [9.9e-3, 1.01e-2, -9.9e-3, -1.01e-2])
def test_k3_is_smooth_where_the_series_ends(x: float) -> None:
    """Against expm1 in more digits than float64 has left there."""
    series = sum(x**n / math.factorial(n) for n in range(2, 14))
    assert value(k3, x, 0.0) == pytest.approx(series, rel=1e-11)


@pytest.mark.parametrize("gap", [1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize("probability", [1e-6, 0.3, 0.999, 1 - 1e-9])
def test_bkl_near_equality(probability: float, gap: float) -> None:
    """KL(Bern(p) || Bern(p e^g)) -> p g^2 / (2 (1 - p)) for g << 1 - p, without cancellation."""
    if gap > 0.01 * (1 - probability):
        pytest.skip("outside the expansion")
    log_prob = math.log(probability)
    expansion = probability * gap**2 / 2 / (1 - probability)
    assert value(bkl, log_prob, log_prob - gap) == pytest.approx(expansion, rel=0.03)


def test_no_probability_under_the_trainer() -> None:
    """log pi_train = -inf: r = 0."""
    assert value(k1, -math.inf, -1.0) == -math.inf
    assert value(k2, -math.inf, -1.0) == math.inf
    assert value(k3, -math.inf, -1.0) == math.inf
    assert value(absolute, -math.inf, -1.0) == 1.0
    assert value(tv, -math.inf, math.log(0.25)) == pytest.approx(0.25)
    assert value(bkl, -math.inf, -1.0) == math.inf
    assert value(bkl_mu, -math.inf, -1.0) == math.inf


def test_certainty() -> None:
    """A log-prob of 0.0 is what float32 makes of near certainty: 1 - p is at least 2^-24, and nothing is infinite."""
    floor, gap = 2.0**-24, -math.expm1(-1e-6)
    one = gap * math.log(gap / floor) + (1 - gap) * -1e-6  # KL(Bern(e^-1e-6) || Bern(1))
    other = floor * math.log(floor / gap) + 1e-6
    assert one > other > 0
    assert value(bkl, 0.0, -1e-6) == value(bkl, -1e-6, 0.0) == pytest.approx(one, rel=1e-9)
    assert value(bkl_mu, 0.0, -1e-6) == pytest.approx(one, rel=1e-9)
    assert value(bkl_mu, -1e-6, 0.0) == pytest.approx(other, rel=1e-9)
    for statistic in (bkl, bkl_mu):
        assert value(statistic, 0.0, 0.0) == 0.0
        assert value(statistic, 1e-4, 0.0) == 0.0  # a rounding above 0 is certainty
        assert abs(value(statistic, -2e-7, 0.0)) < 2e-7  # case 52: was +inf


@given(st.floats(-30.0, 0.0), st.floats(-30.0, 0.0))
def test_bkl_is_the_larger_direction(train: float, rollout: float) -> None:
    """bkl = max(bkl_mu(p, q), bkl_mu(q, p)), and both are at least 0 but for what the floor takes."""
    directions = value(bkl_mu, train, rollout), value(bkl_mu, rollout, train)
    assert value(bkl, train, rollout) == max(directions) >= 0.0
    assert min(directions) >= -(2.0**-24)


@pytest.mark.parametrize("train", [-1e4, -1e9, -3e38])
def test_absurd_log_probs_are_a_huge_mismatch(train: float) -> None:
    """What an engine writes for "no chance": every distance is large, none is NaN, k3 does not turn negative."""
    assert value(k2, train, -1.0) == pytest.approx(0.5 * (train + 1) ** 2)
    assert value(k3, train, -1.0) == pytest.approx(-train, rel=1e-3)
    assert value(k3, -1.0, train) > 3e8
    assert value(absolute, train, -1.0) == pytest.approx(1.0)
    assert value(absolute, -1.0, train) == pytest.approx(math.expm1(20))
    assert value(tv, train, -1.0) == pytest.approx(math.exp(-1))
    assert not math.isnan(value(bkl, train, -1.0))
    assert value(bkl, train, -1.0) > 100


def test_one_probability_in_expectation() -> None:
    """Over a vocabulary of three: E_mu k1 = -KL, E_mu k3 = KL, E_mu |r - 1| = 2 TV."""
    mu, pi = torch.tensor([[0.2, 0.5, 0.3]]).double(), torch.tensor([[0.1, 0.3, 0.6]]).double()
    tokens = TokenLogProbs(pi.log(), mu.log(), torch.ones(1, 3, dtype=torch.bool))
    kl = float((mu * (mu / pi).log()).sum())
    assert float((mu * k1(tokens)).sum()) == pytest.approx(-kl)
    assert float((mu * k3(tokens)).sum()) == pytest.approx(kl)
    assert float((mu * absolute(tokens)).sum()) == pytest.approx(2 * 0.5 * float((mu - pi).abs().sum()))
