"""Numeric cases that other frameworks publish in their own tests, each with its source."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from peers.vector import log_probs
from verl_rollout_corr import correct
from verl_rollout_corr.maths.losses import ppo_clip


def ask(log_ratios: list[list[float]], config: dict[str, Any], **optional: Any) -> Any:
    """`correct` on rows with the given log-ratios, all response tokens."""
    train, rollout = log_probs(log_ratios)
    return correct(train, rollout, torch.ones(train.shape, dtype=torch.int64), config, **optional)


def logs(*ratios: float) -> list[float]:
    return [math.log(r) for r in ratios]


def test_verl_icepop() -> None:
    """verl tests/trainer/ppo/test_rollout_corr.py: r = .4, .8, 6 in [.5, 5]: one weight left of three."""
    config = {"weights": {"level": "token", "lower": 0.5, "upper": 5.0, "outside": "mask"}}
    found = ask([logs(0.4, 0.8, 6.0)], config)
    assert found.weights[0].tolist() == pytest.approx([0.0, 0.8, 0.0])
    metrics = {name.removeprefix("rollout_corr/rollout_is_"): value for name, value in found.metrics.items()}
    assert metrics["std"] == pytest.approx(0.3771236, rel=1e-6)
    assert metrics["eff_sample_size"] == pytest.approx(1 / 3)
    out_of_bounds = metrics["ratio_fraction_high"] + metrics["ratio_fraction_low"]
    assert out_of_bounds == pytest.approx(2 / 3)


def test_verl_token_rejection() -> None:
    """verl test_rollout_corr.py: l = -1 and .5, token_k1 in [.5, 2]: weights .368 and 1.649, half masked."""
    config = {"weights": {"level": "token", "upper": 2.0}, "reject": {"token_k1": {"lower": 0.5, "upper": 2.0}}}
    found = ask([[-1.0, 0.5]], config)
    assert found.weights[0].tolist() == pytest.approx([0.36788, 1.64872], rel=1e-5)
    assert found.keep.tolist() == [[0, 1]]
    assert found.metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.5


def test_verl_icepop_in_a_loss() -> None:
    """verl test_rollout_corr_integration.py: old -1, rollout -.5, -3.5, -.8: weights .60653067, 0, .81873075."""
    config = {"weights": {"level": "token", "lower": 0.5, "upper": 5.0, "outside": "mask"}}
    old, rollout = torch.full((1, 3), -1.0), torch.tensor([[-0.5, -3.5, -0.8]])
    found = correct(old, rollout, torch.ones(1, 3), config)
    assert found.weights[0].tolist() == pytest.approx([0.60653067, 0.0, 0.81873075], rel=1e-6)
    assert found.metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(1 / 3)


def test_nemo_truncated_losses() -> None:
    """NeMo-RL test_loss_functions.py, cap .8, gen -.5, -1.5, -.8, prev -1: token loss -.4744, sequence loss -.4846.

    Before the weights: PPO terms -.5, 1, -2.4 per token (clip .2), -A e^(mean l) with .9086 for the sequence.
    """
    prev, gen, ones = torch.full((1, 3), -1.0), torch.tensor([[-0.5, -1.5, -0.8]]), torch.ones(1, 3)
    current, advantages = torch.tensor([[-1.69315, -1.0, -0.59453]]), torch.tensor([[1.0, -1.0, 2.0]])
    terms = ppo_clip(current, prev, advantages, clip_low=0.2, clip_high=0.2)
    assert terms[0].tolist() == pytest.approx([-0.5, 1.0, -2.4], abs=1e-4)
    token = correct(prev, gen, ones, {"weights": {"level": "token", "upper": 0.8}}).weights
    assert token[0].tolist() == pytest.approx([0.6065, 0.8, 0.8], abs=1e-4)
    assert float((token * terms).mean()) == pytest.approx(-0.4744, abs=1e-4)
    seq = correct(prev, gen, ones, {"weights": {"level": "seq_sum", "upper": 0.8}})
    assert seq.metrics["rollout_corr/rollout_is_raw_mean"] == pytest.approx(0.8187, abs=1e-4)
    ratio = correct(current, prev, ones, {"weights": {"level": "seq_mean"}}).weights
    assert ratio[0].tolist() == pytest.approx([0.9086] * 3, abs=1e-4)
    loss = seq.weights * ratio * -advantages
    assert float(loss.mean()) == pytest.approx(-0.4846, abs=1e-4)


@pytest.mark.parametrize(
    ("ratios", "bounds", "want", "outside"),
    [
        ((1.0, 3.0, 0.5), {"upper": 2.0}, (1.0, 2.0, 0.5), 1 / 3),
        ((0.1, 1.0, 3.0), {"upper": 2.0}, (0.1, 1.0, 2.0), 1 / 3),
        ((0.1, 1.0, 3.0), {"lower": 0.5, "upper": 2.0}, (0.5, 1.0, 2.0), 2 / 3),
    ],
)
def test_nemo_shares_out_of_bounds(ratios: Any, bounds: Any, want: Any, outside: float) -> None:
    """NeMo-RL test_loss_functions.py, is_oob_ratio and the lower bound of truncation."""
    found = ask([logs(*ratios)], {"weights": {"level": "token", **bounds}})
    assert found.weights[0].tolist() == pytest.approx(list(want))
    shares = [found.metrics.get(f"rollout_corr/rollout_is_ratio_fraction_{side}", 0.0) for side in ("high", "low")]
    assert sum(shares) == pytest.approx(outside)


def test_nemo_sequence_mask() -> None:
    """NeMo-RL seq-mask-tis in [.999, 1.002]: a sequence at l = .0005 stays, one that holds -inf is finite."""
    config = {"weights": {"level": "token"}, "reject": {"seq_mean_k1": {"lower": 0.999, "upper": 1.002}}}
    found = ask([[0.0005] * 3, [-0.01] * 3], config)
    assert found.keep.tolist() == [[1, 1, 1], [0, 0, 0]]
    train = torch.tensor([[-1.0, -math.inf, -1.0]])
    holed = correct(train, torch.full((1, 3), -1.0), torch.ones(1, 3), config)
    assert holed.weights.tolist() == [[1.0, 0.0, 1.0]]
    assert math.isfinite(holed.metrics["rollout_corr/kl"])


def test_nemo_two_directions() -> None:
    """NeMo-RL docs/guides/grpo.md: log-probs -5 against -15: K3 about 9 one way and 22,015 the other."""
    low, high = torch.tensor([[-15.0]]), torch.tensor([[-5.0]])
    one = torch.ones(1, 1)
    assert correct(low, high, one, {}).metrics["rollout_corr/k3_kl"] == pytest.approx(9.0000454, rel=1e-7)
    assert correct(high, low, one, {}).metrics["rollout_corr/k3_kl"] == pytest.approx(22015.4658, rel=1e-7)


def test_skyrl_weights() -> None:
    """SkyRL test_off_policy_correction.py: l = .5, -.5, 1: token cap 2, sequence 2.7183, cap 5."""
    row = [[0.5, -0.5, 1.0]]
    token = ask(row, {"weights": {"level": "token", "upper": 2.0}}).weights
    assert token[0].tolist() == pytest.approx([1.6487, 0.6065, 2.0], abs=1e-4)
    assert ask(row, {"weights": {"level": "seq_sum", "upper": 5.0}}).weights[0, 0] == pytest.approx(2.7183, abs=1e-4)
    capped = ask([[1.0, 1.0, 1.0]], {"weights": {"level": "seq_sum", "upper": 5.0}}).weights
    assert capped[0].tolist() == [5.0] * 3


def test_areal() -> None:
    """AReaL test_rejection_sampling.py: geometric weight e^.5; l = 0,2,0 over k2 .1 goes, 0,1,0 stays in .5; clamp."""
    geometric = ask([[0.0, 0.5, 1.0]], {"weights": {"level": "seq_mean"}}).weights
    assert geometric[0].tolist() == pytest.approx([math.exp(0.5)] * 3)
    assert ask([[0.0, 1.0, 0.0]], {"reject": {"seq_mean_k2": {"upper": 0.5}}}).keep.tolist() == [[1, 1, 1]]
    assert ask([[0.0, 2.0, 0.0]], {"reject": {"seq_mean_k2": {"upper": 0.1}}}).keep.tolist() == [[0, 0, 0]]
    clamped = ask([[0.0, 4.0, 0.0]], {"weights": {"level": "token", "upper": 3.0}}).weights
    assert clamped[0].tolist() == [1.0, 3.0, 1.0]


def test_open_instruct() -> None:
    """open-instruct test_olmo_core_train_modules.py: ratios .25 to 4 in [.5, 2], per token and by geometric mean."""
    hair = 1e-9  # a ratio of .5 has gone through a logarithm and a difference
    node = {"level": "token", "lower": 0.5 - hair, "upper": 2.0 + hair, "outside": "mask"}
    assert ask([logs(0.25, 0.5, 1, 2, 4)], {"weights": node}).weights[0].tolist() == pytest.approx([0, 0.5, 1, 2, 0])
    rows = [logs(0.25, 1, 4), logs(4, 4, 4), logs(0.25, 0.25, 0.25)]
    keep = ask(rows, {"reject": {"seq_mean_k1": {"lower": 0.5, "upper": 2.0}}}).keep
    assert keep[:, 0].tolist() == [1, 0, 0]


def test_trl_off_policy_mask() -> None:
    """TRL test_grpo_trainer.py, delta 1: mean log(mu/pi) 2, .5, 2 with advantages +, -, -: kept, kept, dropped."""
    rows = [[-2.0] * 3, [-0.5] * 3, [-2.0] * 3]
    reject = {"seq_mean_k1": {"lower": math.exp(-1), "when": "negative_advantage"}}
    keep = ask(rows, {"reject": reject}, advantages=torch.tensor([1.0, -1.0, -1.0])).keep
    assert keep[:, 0].tolist() == [1, 1, 0]


def test_slime_denominator() -> None:
    """slime issue 657: l = .1, -1.5, .8, -10, .3 masked to .5-2: .49 over five tokens, 1.23 over the two left."""
    node = {"level": "token", "lower": 0.5, "upper": 2.0, "outside": "mask"}
    found = ask([[0.1, -1.5, 0.8, -10.0, 0.3]], {"weights": node})
    assert found.metrics["rollout_corr/rollout_is_mean"] == pytest.approx(0.491, abs=1e-3)
    left = found.weights[found.weights > 0]
    assert float(left.mean()) == pytest.approx(1.2275, abs=1e-4)


def test_trl_truncated_sampling() -> None:
    """TRL issue 7269: top-p .8 renormalises mu over the kept mass S: every ratio is S, so is their mean (.895)."""
    kept = torch.tensor([0.5, 0.25, 0.145], dtype=torch.float64)
    train, rollout = kept.log()[None], (kept / kept.sum()).log()[None]
    found = correct(train, rollout, torch.ones(1, 3), {"weights": {"level": "token"}}).metrics
    assert found["rollout_corr/rollout_is_raw_mean"] == pytest.approx(0.895)
    assert found["rollout_corr/kl"] == pytest.approx(-math.log(0.895))
