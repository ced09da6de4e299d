"""The metrics are the divergences that they are named after, and the inequalities between those hold."""

from __future__ import annotations

import math

import pytest
import torch

from literature.test_unbiased import worlds
from literature.worlds import EIGHTHS, World, world
from verl_rollout_corr import correct

UNBOUNDED = {"upper": 1e30}  # a criterion that never rejects, for its metric


def metrics(w: World, config: dict | None = None) -> dict[str, float]:
    """The package's metrics on the exact batch, without their prefix."""
    found = correct(w.train(), w.rollout(), w.mask(), config or {}).metrics
    return {name.removeprefix("rollout_corr/"): value for name, value in found.items()}


def sequence_kl(w: World) -> float:
    """KL(mu || pi) of whole sequences."""
    return float((w.mu_of * (w.mu_of / w.pi_of()).log()).sum())


def step_values(w: World, divergence: object) -> list[torch.Tensor]:
    """A divergence between the two distributions of every context, per step."""
    return [divergence(mu, pi) for _, mu, pi in w.contexts()]  # type: ignore[operator]


def tv_of(mu: torch.Tensor, pi: torch.Tensor) -> torch.Tensor:
    return 0.5 * (mu - pi).abs().sum(-1)


def kl_of(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p * (p / q).log()).sum(-1)


def chi2_of(mu: torch.Tensor, pi: torch.Tensor) -> torch.Tensor:
    return (pi**2 / mu).sum(-1) - 1


@worlds
def test_k1_and_k3_are_unbiased_for_the_kl(w: World) -> None:
    """E_mu k1 = E_mu k3 = KL(mu || pi), per token and summed (Schulman 2020); the sum is the sequence's KL."""
    found = metrics(w, {"reject": {"seq_sum_k3": UNBOUNDED, "token_k2": UNBOUNDED}})
    kl = sequence_kl(w)
    assert found["kl"] * w.steps == pytest.approx(kl, rel=1e-12)
    assert found["k3_kl"] * w.steps == pytest.approx(kl, rel=1e-12)
    assert found["rollout_rs_seq_sum_k3_mean"] == pytest.approx(kl, rel=1e-12)
    assert found["log_ppl_diff"] * w.steps == pytest.approx(kl, rel=1e-12)
    assert abs(found["rollout_rs_token_k2_mean"] * w.steps / kl - 1) > 1e-3  # k2 is biased


@worlds
def test_chi_squared(w: World) -> None:
    """chi2_seq is the sequences' chi-squared, chi2_token the tokens' average; 1 + chi2_seq <= (1 + chi2_max)^T."""
    found = metrics(w)
    rho = w.pi_of() / w.mu_of
    assert found["chi2_seq"] == pytest.approx(float(w.expect_mu(rho**2)) - 1)
    steps = step_values(w, chi2_of)
    average = [float((reach * x).sum()) for (reach, _, _), x in zip(w.contexts(), steps, strict=True)]
    assert found["chi2_token"] == pytest.approx(sum(average) / w.steps)
    worst = max(float(x.max()) for x in steps)
    assert 1 + found["chi2_seq"] <= (1 + worst) ** w.steps


@pytest.mark.parametrize("seed", range(3))
def test_chi_squared_of_equal_steps_is_the_power(seed: int) -> None:
    """Equality for independent, identical steps."""
    w = world(seed, vocabulary=2, steps=4, iid=True)
    found = metrics(w)
    assert 1 + found["chi2_seq"] == pytest.approx((1 + found["chi2_token"]) ** 4)


def test_how_fast_the_power_grows() -> None:
    """rl-collapse part 2: 1.01^200 = 7.3 and 1.05^200 = 17,292; a product weight does not survive length."""
    for chi2, value in ((0.01, 7.3), (0.05, 17292)):
        log_ratio = 0.5 * math.log1p(chi2)
        train = torch.full((1, 200), -1.0, dtype=torch.float64)
        found = correct(train, train - log_ratio, torch.ones(1, 200), {}).metrics["rollout_corr/chi2_seq"]
        assert 1 + found == pytest.approx(value, rel=5e-3)


@worlds
def test_the_effective_sample_size(w: World) -> None:
    """ESS/n = 1 / (1 + chi2) of the unbounded weights: in the limit of many samples, and exactly on the exact batch."""
    for level, chi2 in (("seq_sum", "chi2_seq"), ("token", "chi2_token")):
        found = metrics(w, {"weights": {"level": level}})
        assert found["rollout_is_eff_sample_size"] == pytest.approx(1 / (1 + found[chi2]))
        assert found["rollout_is_std"] ** 2 == pytest.approx(found[chi2])


@pytest.mark.parametrize("n", [20_000])
def test_the_effective_sample_size_in_the_limit(n: int) -> None:
    """The same from samples of mu."""
    w = world(4)
    pick = torch.randint(len(w.rows), (n,), generator=torch.Generator().manual_seed(0))
    config = {"weights": {"level": "seq_sum"}}
    found = correct(w.train()[pick], w.rollout()[pick], w.mask()[pick], config).metrics
    assert found["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1 / (1 + metrics(w)["chi2_seq"]), rel=0.02)


@worlds
def test_abs_is_twice_the_total_variation(w: World) -> None:
    """E_mu |r - 1| = 2 TV per context (DPPO, arXiv 2602.04879)."""
    found = metrics(w, {"reject": {"token_abs": UNBOUNDED}})
    tv = [float((reach * x).sum()) for (reach, _, _), x in zip(w.contexts(), step_values(w, tv_of), strict=True)]
    assert found["rollout_rs_token_abs_mean"] == pytest.approx(2 * sum(tv) / w.steps)


@worlds
def test_binary_divergences_are_below_the_full_ones(w: World) -> None:
    """Data processing: tv <= TV, bkl_mu <= KL(mu || pi), bkl <= max of the two KLs, for whichever token was sampled."""
    tokens = {"reject": {"seq_max_tv": UNBOUNDED, "seq_max_bkl": UNBOUNDED, "seq_max_bkl_mu": UNBOUNDED}}
    found = metrics(w, tokens)
    tv = max(float(x.max()) for x in step_values(w, tv_of))
    kl = max(float(x.max()) for x in step_values(w, kl_of))
    reverse = max(float(x.max()) for x in step_values(w, lambda mu, pi: kl_of(pi, mu)))
    assert 0 < found["rollout_rs_seq_max_tv_max"] <= tv + 1e-12
    assert 0 < found["rollout_rs_seq_max_bkl_max"] <= max(kl, reverse) + 1e-12
    assert 0 < found["rollout_rs_seq_max_bkl_mu_max"] <= kl + 1e-12
    for reach, mu, pi in w.contexts():
        assert reach.sum() == pytest.approx(1.0)
        flat_mu, flat_pi = mu.reshape(-1, 1), pi.reshape(-1, 1)
        each = correct(flat_pi.log(), flat_mu.log(), torch.ones_like(flat_mu), tokens).metrics
        assert each["rollout_corr/rollout_rs_seq_max_tv_max"] == pytest.approx(float((mu - pi).abs().max()))


@worlds
def test_two_words_are_the_full_divergence(w: World) -> None:
    """With a vocabulary of two nothing is lost: tv = TV, bkl_mu is KL(mu || pi) and bkl the larger KL."""
    if w.vocabulary != 2:
        pytest.skip("a vocabulary of two")
    reject = {name: UNBOUNDED for name in ("seq_max_tv", "seq_max_bkl", "seq_max_bkl_mu", "token_bkl_mu")}
    found = metrics(w, {"reject": reject})
    assert found["rollout_rs_seq_max_bkl_mu_max"] == pytest.approx(max(float(x.max()) for x in step_values(w, kl_of)))
    assert found["rollout_rs_token_bkl_mu_mean"] * w.steps == pytest.approx(sequence_kl(w))  # FlashREINFORCE's, per row
    pairs = [kl_of(mu, pi).maximum(kl_of(pi, mu)) for _, mu, pi in w.contexts()]
    assert found["rollout_rs_seq_max_bkl_max"] == pytest.approx(max(float(x.max()) for x in pairs))
    assert found["rollout_rs_seq_max_tv_max"] == pytest.approx(max(float(x.max()) for x in step_values(w, tv_of)))


@worlds
def test_inequalities(w: World) -> None:
    """TV(seq) <= sum_t E TV_t <= T TV_max; TV <= sqrt(KL / 2); TV <= sqrt(chi2) / 2."""
    found = metrics(w, {"reject": {"token_abs": UNBOUNDED}})
    tv_seq = float(0.5 * (w.pi_of() - w.mu_of).abs().sum())
    summed = found["rollout_rs_token_abs_mean"] / 2 * w.steps
    assert tv_seq <= summed <= w.steps * max(float(x.max()) for x in step_values(w, tv_of)) + 1e-12
    assert tv_seq <= math.sqrt(found["kl"] * w.steps / 2)
    assert tv_seq <= 0.5 * math.sqrt(found["chi2_seq"])


@worlds
def test_the_geometric_mean_and_opsm(w: World) -> None:
    """log of the geometric mean has the mean -KL/T; DeepSeek-V3.2's condition mean log(mu/pi) > d is rho_geo < e^-d."""
    d = 0.02
    config = {"reject": {"seq_mean_k1": {"lower": math.exp(-d)}}}
    found = correct(w.train(), w.rollout(), w.mask(), config)
    distance = (w.rollout() - w.train()).mean(1)
    assert torch.equal(found.keep[:, 0], distance <= d)
    assert float(-distance.mean()) * w.steps == pytest.approx(-sequence_kl(w))


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_acceptance_of_the_maximum_falls_with_length(steps: int) -> None:
    """(1 - p)^T for independent steps that violate with probability p; a mean does not (Trust Region Masking)."""
    w = world(1, vocabulary=2, steps=steps, iid=True)
    violated = (w.rollout() - w.train())[:, :1] ** 2 / 2
    limit = float(violated.mean())
    p = float((violated > limit).double().mean())
    assert 0 < p < 1
    found = metrics(w, {"reject": {"seq_max_k2": {"upper": limit}}})
    assert 1 - found["rollout_rs_seq_dropped_fraction"] == pytest.approx((1 - p) ** steps)
    assert round(p * EIGHTHS) == pytest.approx(p * EIGHTHS)


def test_how_long_a_product_lives() -> None:
    """T* = log C / log rho_bar (rl-collapse part 3): at 1.001 a token, C = 5 is passed after 1,610 tokens."""
    reached = math.log(5) / math.log(1.001)
    assert int(reached) == 1610
    for length, kept in ((1610, 1), (1611, 0)):
        train = torch.full((1, length), -1.0, dtype=torch.float64)
        found = correct(
            train, train - math.log(1.001), torch.ones(1, length), {"reject": {"seq_sum_k1": {"upper": 5.0}}}
        )
        assert int(found.keep[0, 0]) == kept
