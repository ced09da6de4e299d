"""What truncation and masking cost, exactly, and the bounds that the literature gives for it.

Li et al. (2025), rl-collapse parts 1-3: TIS (truncate), MIS (mask); K is the largest |f|.
"""

from __future__ import annotations

import math

import pytest
import torch

from literature.test_unbiased import FP32, weights, worlds
from literature.worlds import World, reward, world
from verl_rollout_corr import correct

caps = pytest.mark.parametrize("cap", [1.0, 1.5, 2.0, 5.0])


def sequence_ratio(w: World) -> torch.Tensor:
    """rho of every sequence."""
    return w.pi_of() / w.mu_of


def chi2_seq(w: World) -> float:
    """chi-squared divergence of the sequences, by the package's metric: exact on the exact batch."""
    return correct(w.train(), w.rollout(), w.mask(), {}).metrics["rollout_corr/chi2_seq"]


@worlds
@caps
def test_the_bias_of_truncation(w: World, cap: float) -> None:
    """E_mu[(min(rho, C) - rho) f], at most K P_pi(rho > C), K (1 + chi2) / (4C) and the blog's 2K (1 + chi2) / C."""
    f, rho = reward(w), sequence_ratio(w)
    found = float((weights(w, "seq_sum", upper=cap)[:, 0] * f[w.rows]).mean() - w.expect_pi(f))
    assert found == pytest.approx(float(w.expect_mu((rho.clamp(max=cap) - rho) * f)), abs=FP32)
    k, above = float(f.abs().max()), float((w.pi_of() * (rho > cap)).sum())
    second_moment = 1 + chi2_seq(w)
    assert second_moment == pytest.approx(float(w.expect_mu(rho**2)))
    for bound in (k * above, k * second_moment / (4 * cap), 2 * k * second_moment / cap):
        assert abs(found) <= bound + FP32


@worlds
@caps
def test_the_bias_of_masking(w: World, cap: float) -> None:
    """-E_pi[f 1{rho > C}] exactly: masking loses those sequences whole."""
    f, rho = reward(w), sequence_ratio(w)
    found = float((weights(w, "seq_sum", upper=cap, outside="mask")[:, 0] * f[w.rows]).mean() - w.expect_pi(f))
    assert found == pytest.approx(-float((w.pi_of() * f * (rho > cap)).sum()), abs=FP32)


@worlds
def test_rejection_alone_is_a_third_expectation(w: World) -> None:
    """keep without weights gives E_mu[f 1{kept}], and its denominator decides what it estimates (section 8)."""
    f, rho = reward(w), sequence_ratio(w)
    kept = correct(w.train(), w.rollout(), w.mask(), {"reject": {"seq_sum_k1": {"upper": 1.5}}}).keep[:, 0]
    inside = rho <= 1.5
    over_all = float((kept * f[w.rows]).mean())
    assert over_all == pytest.approx(float(w.expect_mu(f * inside)))
    over_kept = float((kept * f[w.rows]).sum() / kept.sum())
    assert over_kept == pytest.approx(float(w.expect_mu(f * inside) / w.expect_mu(inside.double())))


def test_a_wide_cap_is_no_cap() -> None:
    """Above the largest ratio both forms are unbiased."""
    w = world(5)
    cap = float(sequence_ratio(w).max()) * 1.001
    for outside in ("truncate", "mask"):
        assert torch.equal(weights(w, "seq_sum", upper=cap, outside=outside), weights(w, "seq_sum"))


@worlds
def test_the_cap_that_minimises_the_bound(w: World) -> None:
    """C* = sqrt(2 (1 + chi2)) minimises 4 K^2 (1 + chi2)^2 / C^2 + K^2 C^2, with the value 4 K^2 (1 + chi2)."""
    moment = 1 + chi2_seq(w)

    def bound(cap: float) -> float:
        return 4 * moment**2 / cap**2 + cap**2

    best = math.sqrt(2 * moment)
    assert bound(best) == pytest.approx(4 * moment)
    assert all(bound(best) <= bound(best * factor) for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0))


@worlds
@caps
def test_truncated_token_weights_underestimate(w: World, cap: float) -> None:
    """E_mu[min(r_t, C)] = 1 - E_mu[(r_t - C)+] per step: what verl's rollout_is_mean below 1 means."""
    found = weights(w, "token", upper=cap).mean(0)
    for t, (reach, mu, pi) in enumerate(w.contexts()):
        lost = (reach[:, None] * (pi - cap * mu).clamp(min=0)).sum()
        assert found[t] == pytest.approx(1 - float(lost), abs=FP32)
