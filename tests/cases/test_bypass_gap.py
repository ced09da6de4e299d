"""Case 42: the engine's gap inside PPO's clip, in bypass mode."""

from __future__ import annotations

import pytest
import torch

from cases.rows import ask, from_log_ratios, metric
from verl_rollout_corr.maths.losses import ppo_clip, reinforce


def gradient(loss_of: str, gap: float, advantage: float) -> float:
    """d loss / d log pi_theta of a token, before anything was learned: pi_theta is pi_old, and mu is `gap` below it."""
    rollout = torch.tensor([[-1.0]], dtype=torch.float64)
    log_prob = (rollout + gap).requires_grad_()
    advantages = torch.tensor([[advantage]], dtype=torch.float64)
    if loss_of == "ppo_clip":
        loss = ppo_clip(log_prob, rollout, advantages, clip_low=0.2, clip_high=0.2)
    else:
        loss = reinforce(log_prob, None, advantages)
    return float(torch.autograd.grad(loss.sum(), log_prob)[0])


@pytest.mark.parametrize(
    ("gap", "advantage", "want"),
    [
        (0.19, 1.0, 0.0),  # r = 1.209, above 1.2: nothing is learned
        (0.18, 1.0, -1.1972),  # r = 1.197, inside
        (0.19, -1.0, 1.2092),  # the other sign is not clipped
        (-0.23, -1.0, 0.0),  # r = .795, below .8
        (0.0, 1.0, -1.0),
    ],
)
def test_case_42_the_gap_alone_leaves_the_clip(gap: float, advantage: float, want: float) -> None:
    """By hand: the gradient of -r A is -r A while r is inside, and 0 outside on the side of the advantage."""
    assert gradient("ppo_clip", gap, advantage) == pytest.approx(want, abs=1e-4)


def test_case_42_sibling_reinforce_has_no_clip() -> None:
    """The same token still learns."""
    assert gradient("reinforce", 0.19, 1.0) == pytest.approx(-1.0)


def test_case_42_the_metrics_show_it() -> None:
    """abs_ratio_diff is what to hold against the clip; kl alone may cancel."""
    found = ask(from_log_ratios([0.19, -0.19]))
    assert metric(found, "kl") == pytest.approx(0.0, abs=1e-12)
    assert metric(found, "abs_ratio_diff") == pytest.approx((0.2092 + 0.1730) / 2, abs=1e-4)
