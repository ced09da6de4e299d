"""DPPO and FlashREINFORCE beside the frameworks that have them: their rules from the formula, and verl's own functions.

What differs is in docs/choosing.md, under "Trust regions beside their sources", each with its test here.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from verl_rollout_corr import correct, load_preset
from verl_rollout_corr.maths.losses import aggregate, reinforce

SEEDS = range(20)


def draw(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log pi_theta, log mu, mask and advantages; ratios from 1/100 to 100, some advantages 0, float64."""
    rng = np.random.default_rng([seed, 2602])
    rollout = np.log(rng.uniform(1e-3, 0.98, (6, 12)))
    train = np.minimum(rollout + rng.normal(0, rng.choice([0.02, 0.3, 1.5]), (6, 12)), math.log(0.98))
    advantages = rng.normal(size=(6, 12)) * (rng.random((6, 12)) < 0.9)
    mask = rng.random((6, 12)) < 0.8
    return tuple(torch.from_numpy(array) for array in (train, rollout, mask, advantages))  # type: ignore[return-value]


def bernoulli_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(Bern(p) || Bern(q)) as it is written."""
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def dropped_by_dppo(kind: str, train: Tensor, rollout: Tensor, advantages: Tensor) -> Tensor:
    """DPPO (arXiv 2602.04879), as SkyRL 0.4 has it: out iff D > delta and the update leads away from mu.

    Bin-TV: D = |p - q|, delta .2. Bin-KL: D = KL(Bern(q) || Bern(p)), delta .05.
    """
    p, q = train.exp(), rollout.exp()
    away = ((advantages > 0) & (p > q)) | ((advantages < 0) & (p < q))
    return away & ((p - q).abs() > 0.2 if kind == "tv" else bernoulli_kl(q, p) > 0.05)


def gradient(preset: str, train: Tensor, rollout: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """Of the loss of bypass mode with a preset, as the actor has it: decided from the current policy, token-mean."""
    log_prob = train.clone().requires_grad_()
    found = correct(log_prob, rollout, mask, preset, advantages=advantages)
    aggregate(reinforce(log_prob, found.weights, advantages), mask, found.keep, "token-mean").backward()
    assert log_prob.grad is not None
    return log_prob.grad


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_dppo_drops_what_skyrl_drops(kind: str) -> None:
    """Token by token, on batches in which something is kept and something dropped."""
    share = []
    for seed in SEEDS:
        train, rollout, mask, advantages = draw(seed)
        keep = correct(train, rollout, mask, f"dppo_{kind}", advantages=advantages).keep
        want = mask & ~dropped_by_dppo(kind, train, rollout, advantages)
        assert torch.equal(keep, want), seed
        share.append(float(keep.sum() / mask.sum()))
    assert 0.5 < np.mean(share) < 0.99


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_dppo_has_skyrls_gradient_up_to_a_ratio_of_ten(kind: str) -> None:
    """Of -r A on what is left, over all response tokens. Above 10 ours keeps the weight 10, SkyRL's has r itself."""
    above = 0
    for seed in SEEDS:
        train, rollout, mask, advantages = draw(seed)
        log_prob = train.clone().requires_grad_()
        left = mask & ~dropped_by_dppo(kind, train, rollout, advantages)
        surrogate = -(log_prob - rollout).exp() * advantages
        (torch.where(left, surrogate, 0.0).sum() / mask.sum()).backward()
        r = (train - rollout).exp()
        want = torch.where(r > 10, log_prob.grad / r * 10, log_prob.grad)
        found = gradient(f"dppo_{kind}", train, rollout, mask, advantages)
        torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-12)
        above += int((left & (r > 10) & (advantages != 0)).sum())
    assert above > 0


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_dppo_is_verls_own_loss_in_bypass_mode(kind: str) -> None:
    """verl's dppo_tv and dppo_kl with old_log_prob = log mu, its clip_ratio at delta and clip_ratio_c at 10."""
    algos = pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl is not installed")
    options: dict[str, Any] = {"clip_ratio": {"tv": 0.2, "kl": 0.05}[kind], "clip_ratio_c": 10.0}
    config = SimpleNamespace(
        **options, clip_ratio_low=None, clip_ratio_high=None, global_batch_info={}, get=options.get
    )
    for seed in SEEDS:
        train, rollout, mask, advantages = draw(seed)
        log_prob = train.clone().requires_grad_()
        loss, _ = algos.get_policy_loss_fn(f"dppo_{kind}")(
            rollout, log_prob, advantages, mask.double(), "token-mean", config
        )
        loss.backward()
        found = gradient(f"dppo_{kind}", train, rollout, mask, advantages)
        # verl's loss divides by the tokens + 1e-8, and its Bernoulli KL adds 1e-8 to both complements.
        torch.testing.assert_close(found, log_prob.grad, rtol=1e-6, atol=1e-12)


def test_flash_reinforce_keeps_rows_by_their_mean_divergence() -> None:
    """molt, OpenRLHF 0.11: a row stays iff its mean KL(Bern(mu) || Bern(pi)) <= 3e-3; -r A log pi over all tokens."""
    kept, rows = 0, 0
    for seed in SEEDS:
        train, rollout, mask, advantages = draw(seed)
        divergence = torch.where(mask, bernoulli_kl(rollout.exp(), train.exp()), 0.0).sum(1) / mask.sum(1)
        stays = (divergence <= 3e-3)[:, None] & mask
        found = correct(train, rollout, mask, "flash_reinforce", advantages=advantages)
        assert torch.equal(found.keep, stays), seed
        torch.testing.assert_close(found.weights, torch.where(mask, (train - rollout).exp(), 0.0).float())
        log_prob = train.clone().requires_grad_()
        loss = torch.where(stays, -(train - rollout).exp() * advantages * log_prob, 0.0)
        (loss.sum() / mask.sum()).backward()
        torch.testing.assert_close(
            gradient("flash_reinforce", train, rollout, mask, advantages), log_prob.grad, rtol=1e-6, atol=1e-12
        )
        kept, rows = kept + int(stays.any(1).sum()), rows + int(mask.any(1).sum())
    assert 0.05 * rows < kept < 0.95 * rows


def one(train: float, rollout: float) -> tuple[Tensor, Tensor, Tensor]:
    return torch.tensor([[train]]).double(), torch.tensor([[rollout]]).double(), torch.ones(1, 1, dtype=torch.bool)


def test_difference_a_certain_token_is_not_infinitely_far() -> None:
    """mu = 1 exactly, pi = 1 - 1e-3. SkyRL and verl add 1e-8 to the complements, ours are at least 2^-24: it stays.

    Where pi = 1 exactly and mu = .9, the divergence is .9 log .9 + .1 log(.1 / complement): 1.34, and 1.52 with 1e-8.
    """
    (row,) = correct(*one(math.log(1 - 1e-3), 0.0), "dppo_kl", advantages=[-1.0]).rows()
    assert row["why"] == []
    found = correct(*one(0.0, math.log(0.9)), "dppo_kl", advantages=[1.0]).criteria["token_bkl_mu"]
    floor, plus = 2.0**-24, 1e-8
    assert float(found.value) == pytest.approx(0.9 * math.log(0.9) + 0.1 * math.log(0.1 / floor), rel=1e-6)
    assert float(found.value) == pytest.approx(1.34, abs=0.01)
    assert 0.9 * math.log(0.9) + 0.1 * math.log(0.1 / plus) == pytest.approx(1.52, abs=0.01)


def test_difference_one_bound_for_both_signs() -> None:
    """SkyRL and verl have delta_low and delta_high; a criterion has one bound, so that asks for equal ones."""
    (criterion,) = load_preset("dppo_tv").reject
    assert (criterion.bounds.lower, criterion.bounds.upper) == (None, 0.2)
