"""What the gradient of each loss and each KL estimator is the gradient of, by enumeration."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from literature.test_unbiased import FP32, worlds
from literature.worlds import World, reward, world
from verl_rollout_corr import correct
from verl_rollout_corr.maths.log_ratio import TokenLogProbs, ratio
from verl_rollout_corr.maths.losses import aggregate, ppo_clip, reinforce
from verl_rollout_corr.maths.statistics import k1, k2, k3

MODE = "seq-mean-token-sum"  # the mean over rows is E_mu


def loss_gradient(w: World, level: str, advantages: Tensor) -> list[Tensor]:
    """The gradient of the REINFORCE loss with these weights, by the package from log-probs to scalar."""
    train = w.train(graph=True)
    weights = correct(train, w.rollout(), w.mask(), {"weights": {"level": level}}).weights
    loss = aggregate(reinforce(train, weights, advantages), w.mask(), w.mask(), MODE)
    return list(torch.autograd.grad(loss, w.logits))


def assert_close(found: Sequence[Tensor], want: Sequence[Tensor], tolerance: float = 3 * FP32) -> None:
    """Every step's gradient."""
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def differs(found: Sequence[Tensor], want: Sequence[Tensor]) -> bool:
    """Whether they are apart by more than rounding."""
    return max(float((a - b).abs().max()) for a, b in zip(found, want, strict=True)) > 1e-4


def negated(gradient: Sequence[Tensor]) -> list[Tensor]:
    return [-g for g in gradient]


def terminal(w: World) -> Tensor:
    """A terminal reward as every token's advantage, (rows, steps)."""
    return reward(w)[w.rows][:, None].expand(-1, w.steps)


@worlds
def test_sequence_weights_give_the_policy_gradient(w: World) -> None:
    """E_mu[rho R grad log pi] = grad J(pi), exactly, however far mu is."""
    assert_close(loss_gradient(w, "seq_sum", terminal(w)), negated(w.policy_gradient(reward(w))))


@worlds
def test_token_weights_give_the_gradient_of_the_surrogate(w: World) -> None:
    """E_mu[R sum r_t grad log pi_t] is the gradient of E_mu[R sum r_t] (contexts of mu), not of J beyond one step."""
    found = loss_gradient(w, "token", terminal(w))
    surrogate = ((w.train(graph=True) - w.rollout()).exp().sum(1) * reward(w)[w.rows]).mean()
    assert_close(found, negated(torch.autograd.grad(surrogate, w.logits)))
    assert differs(found, negated(w.policy_gradient(reward(w))))


def test_token_weights_are_exact_for_one_step() -> None:
    """With one step token, prefix and sequence are the same unbiased estimator."""
    w = world(2, vocabulary=4, steps=1)
    for level in ("token", "prefix_sum", "seq_sum", "turn_sum", "seq_mean"):
        assert_close(loss_gradient(w, level, terminal(w)), negated(w.policy_gradient(reward(w))))


@worlds
def test_no_weights_give_neither(w: World) -> None:
    """E_mu[R grad log pi]: what training does when the mismatch is ignored."""
    train = w.train(graph=True)
    loss = aggregate(reinforce(train, None, terminal(w)), w.mask(), w.mask(), MODE)
    found = list(torch.autograd.grad(loss, w.logits))
    assert differs(found, negated(w.policy_gradient(reward(w))))


def action_values(w: World) -> Tensor:
    """Q^pi of the tokens up to t, for every row: (rows, steps)."""
    pi, f = w.pi_of(), reward(w)
    columns = []
    for t in range(w.steps):
        size = w.vocabulary ** (w.steps - t - 1)
        mass, value = pi.reshape(-1, size).sum(1), (pi * f).reshape(-1, size).sum(1)
        columns.append((value / mass)[w.rows // size])
    return torch.stack(columns, 1)


@worlds
def test_prefix_weights_give_the_policy_gradient_for_action_values(w: World) -> None:
    """E_mu[sum_t w_t Q^pi(c_t, a_t) grad log pi_t] = grad J with w_t the prefix product; token weights are biased."""
    q, want = action_values(w), negated(w.policy_gradient(reward(w)))
    assert_close(loss_gradient(w, "prefix_sum", q), want)
    assert differs(loss_gradient(w, "token", q), want)


@worlds
def test_prefix_weights_are_biased_for_a_terminal_reward(w: World) -> None:
    """A reward that later tokens decide needs their ratios too: there only the sequence form is unbiased."""
    assert differs(loss_gradient(w, "prefix_sum", terminal(w)), negated(w.policy_gradient(reward(w))))


@worlds
def test_unclipped_ppo_is_the_token_form(w: World) -> None:
    """The gradient of -r A is -r A grad log pi: PPO in bypass mode carries its weight in its ratio already."""
    train = w.train(graph=True)
    per_token = ppo_clip(train, w.rollout(), terminal(w), clip_low=0.999, clip_high=1e6)
    found = torch.autograd.grad(aggregate(per_token, w.mask(), w.mask(), MODE), w.logits)
    assert_close(list(found), loss_gradient(w, "token", terminal(w)))


def test_a_gradient_through_the_weight_would_add_a_term() -> None:
    """grad(w log pi) with w = pi/mu not detached has log pi grad w in it (xihuai18): the package's weight has not."""
    w = world(0)
    train = w.train(graph=True)
    leaking = -(ratio((train - w.rollout()).sum(1))[:, None] * terminal(w) * train).sum(1).mean()
    assert differs(list(torch.autograd.grad(leaking, w.logits)), loss_gradient(w, "seq_sum", terminal(w)))


# xihuai18, "Rethinking KL regularisation in RLHF": estimators as losses. One step; q is optimised, p is the reference.


@pytest.fixture
def one_step() -> tuple[World, Tensor]:
    """q = pi of the world, samples from its mu; log p of the four words."""
    return world(3, vocabulary=4, steps=1), torch.log_softmax(torch.tensor([0.3, -0.5, 0.1, 0.4]).double(), 0)


def under_q(w: World, log_p: Tensor) -> tuple[TokenLogProbs, Tensor]:
    """Samples of q as mu of the statistics: all words, and their probabilities as weights."""
    log_q = w.pi_tables(graph=True)[0]
    mask = torch.ones_like(log_q, dtype=torch.bool)
    return TokenLogProbs(train=log_p[None], rollout=log_q, mask=mask), log_q.exp().detach()


def reverse_kl(w: World, log_p: Tensor) -> list[Tensor]:
    """grad KL(q || p)."""
    log_q = w.pi_tables(graph=True)[0]
    return list(torch.autograd.grad((log_q.exp() * (log_q - log_p)).sum(), w.logits))


def forward_kl(w: World, log_p: Tensor) -> list[Tensor]:
    """grad KL(p || q)."""
    log_q = w.pi_tables(graph=True)[0]
    return list(torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), w.logits))


def test_on_policy_estimators_as_losses(one_step: tuple[World, Tensor]) -> None:
    """E_q[grad k1] = 0; E_q[grad k2] = grad KL(q || p); E_q[grad k3] = grad KL(p || q), the wrong direction."""
    w, log_p = one_step
    for statistic, want in ((k1, None), (k2, reverse_kl(w, log_p)), (k3, forward_kl(w, log_p))):
        tokens, mass = under_q(w, log_p)
        found = list(torch.autograd.grad((mass * statistic(tokens)).sum(), w.logits))
        assert_close(found, [torch.zeros_like(x) for x in w.logits] if want is None else want, 1e-12)
    assert differs(reverse_kl(w, log_p), forward_kl(w, log_p))


def test_off_policy_estimators_as_losses(one_step: tuple[World, Tensor]) -> None:
    """From samples of mu: (q/mu) k1, sg(q/mu) k2 and (q/mu) k3 give grad KL(q || p), (q/mu) k2 does not."""
    w, log_p = one_step
    want = reverse_kl(w, log_p)

    def gradient(name: str, *, detached: bool) -> list[Tensor]:
        log_q = w.train(graph=True)
        tokens = TokenLogProbs(train=log_p[w.rows][:, None], rollout=log_q, mask=w.mask())
        value = {"k1": -k1(tokens), "k2": k2(tokens), "k3": k3(tokens)}[name]
        weight = ratio(log_q - w.rollout())
        if detached:
            weight = correct(log_q, w.rollout(), w.mask(), {"weights": {"level": "token"}}).weights
        return list(torch.autograd.grad((weight * value).mean(), w.logits))

    assert_close(gradient("k1", detached=False), want, 1e-12)
    assert_close(gradient("k3", detached=False), want, 1e-12)
    assert_close(gradient("k2", detached=True), want)
    assert differs(gradient("k2", detached=False), want)
    assert differs(gradient("k3", detached=True), want)
