"""Which weights make which expectation exact: E_mu[w f] = E_pi[f], by enumeration.

Precup, Sutton, Singh (2000) for the sequence and the per-decision form; Li et al. (2025), rl-collapse parts 1-3, for
the sequence form and for what the token form leaves out.
"""

from __future__ import annotations

import pytest
import torch

from literature.worlds import World, reward, world
from verl_rollout_corr import correct

FP32 = 3e-7  # weights leave as float32

worlds = pytest.mark.parametrize(
    "w", [world(s, vocabulary=v, steps=t) for s, v, t in ((0, 3, 3), (1, 2, 4), (2, 4, 3))]
)


def weights(w: World, level: str, **bounds: object) -> torch.Tensor:
    """The package's weights for the exact batch."""
    return correct(w.train(), w.rollout(), w.mask(), {"weights": {"level": level, **bounds}}).weights.double()


@worlds
@pytest.mark.parametrize("level", ["token", "prefix_sum", "seq_sum"])
def test_the_mean_weight_is_one(w: World, level: str) -> None:
    """E_mu[r_t] = E_mu[prod] = 1 at every step, whatever the drift; the average of log r is below 0 all the same."""
    torch.testing.assert_close(weights(w, level).mean(0), torch.ones(w.steps).double(), rtol=FP32, atol=FP32)
    assert correct(w.train(), w.rollout(), w.mask(), {}).metrics["rollout_corr/kl"] > 0


@worlds
def test_sequence_weights_are_unbiased_for_anything(w: World) -> None:
    """E_mu[w R] = E_pi[R] for a terminal reward."""
    f = reward(w)
    found = (weights(w, "seq_sum")[:, 0] * f[w.rows]).mean()
    assert found == pytest.approx(float(w.expect_pi(f)), abs=FP32)


@worlds
def test_the_geometric_mean_is_biased(w: World) -> None:
    """seq_mean is no estimator of E_pi[R], nor is its mean 1: the price of not shrinking with the length."""
    f = reward(w)
    found = weights(w, "seq_mean")[:, 0]
    assert abs(float((found * f[w.rows]).mean() - w.expect_pi(f))) > 1e-3
    assert float(found.mean()) < 1.0  # Jensen: E[rho^(1/T)] <= (E rho)^(1/T) = 1


def step_rewards(w: World) -> torch.Tensor:
    """A reward g_t of the prefix up to t, for every sequence: (sequences, steps)."""
    generator = torch.Generator().manual_seed(3)
    columns = []
    for t in range(w.steps):
        table = torch.rand(w.vocabulary ** (t + 1), generator=generator, dtype=torch.float64) * 2 - 1
        columns.append(table[w.sequences // w.vocabulary ** (w.steps - t - 1)])
    return torch.stack(columns, 1)


@worlds
def test_prefix_weights_are_unbiased_for_rewards_as_they_come(w: World) -> None:
    """E_mu[sum_t w_t g_t] = E_pi[sum_t g_t] where g_t is a function of the tokens up to t (per-decision IS)."""
    g = step_rewards(w)
    found = (weights(w, "prefix_sum") * g[w.rows]).sum(1).mean()
    assert found == pytest.approx(float(w.expect_pi(g.sum(1))), abs=3 * FP32)
    per_sequence = (weights(w, "seq_sum") * g[w.rows]).sum(1)
    assert per_sequence.mean() == pytest.approx(float(w.expect_pi(g.sum(1))), abs=3 * FP32)


def test_per_decision_weights_vary_less() -> None:
    """The reason for them: the variance of the same unbiased sum is smaller than with whole-sequence weights."""
    w = world(0, vocabulary=3, steps=3, gap=0.8)
    g = torch.ones(len(w.sequences), w.steps, dtype=torch.float64)
    prefix, seq = ((weights(w, level) * g[w.rows]).sum(1).var() for level in ("prefix_sum", "seq_sum"))
    assert prefix < seq


@worlds
def test_token_weights_are_unbiased_given_the_contexts_of_mu(w: World) -> None:
    """E_mu[r_t g(c_t, a_t)] = E_{c ~ mu} E_{a ~ pi}[g]: one step is exact, the contexts stay those of mu."""
    g = step_rewards(w)
    found = (weights(w, "token") * g[w.rows]).mean(0)
    for t, (reach, _, pi) in enumerate(w.contexts()):
        table = g[:: w.vocabulary ** (w.steps - t - 1), t].reshape(-1, w.vocabulary)
        assert found[t] == pytest.approx(float((reach[:, None] * pi * table).sum()), abs=FP32)
    if w.steps > 1:
        assert abs(float(found.sum() - w.expect_pi(g.sum(1)))) > 1e-3
    first = float((w.pi_of() * g[:, 0]).sum())
    assert found[0] == pytest.approx(first, abs=FP32)


@worlds
def test_turn_weights_are_exact_within_a_turn(w: World) -> None:
    """Two turns with a tool's answer between: each turn is exact given mu's contexts, their product is exact."""
    train, rollout = w.train(), w.rollout()
    hole = torch.full((len(train), 1), torch.nan, dtype=torch.float64)
    mask = torch.cat([w.mask()[:, :1], torch.zeros(len(train), 1, dtype=torch.bool), w.mask()[:, 1:]], 1)
    spaced = [torch.cat([x[:, :1], hole, x[:, 1:]], 1) for x in (train, rollout)]
    found = correct(*spaced, mask, {"weights": {"level": "turn_sum"}}).weights.double()
    product = found[:, 0] * found[:, 2]
    torch.testing.assert_close(product, weights(w, "seq_sum")[:, 0], rtol=1e-6, atol=0)
    assert float((product * reward(w)[w.rows]).mean()) == pytest.approx(float(w.expect_pi(reward(w))), abs=FP32)
    assert float(found[:, 2].mean()) == pytest.approx(1.0, abs=FP32)


@worlds
def test_normalised_weights_have_mean_one(w: World) -> None:
    """Self-normalised importance sampling: sum(w R) / sum(w)."""
    f = reward(w)[w.rows]
    raw = weights(w, "seq_sum", upper=2.0)[:, 0]
    found = correct(
        w.train(), w.rollout(), w.mask(), {"weights": {"level": "seq_sum", "lower": 0.01, "normalize": "batch"}}
    ).weights[:, 0]
    assert float(found.double().mean()) == pytest.approx(1.0, abs=FP32)
    capped = weights(w, "seq_sum", upper=2.0, normalize="batch")[:, 0]
    expected = (raw / raw.mean()).clamp(max=2.0)
    torch.testing.assert_close(capped, expected, rtol=3e-7, atol=0)
    assert float((found * f).mean()) == pytest.approx(float(w.expect_pi(reward(w))), abs=1e-6)
