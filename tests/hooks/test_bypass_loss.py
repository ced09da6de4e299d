"""Bypass mode's loss by hand: the gradient of each token's log-prob, decided from the current policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hooks import direct
from hooks.rows import Row
from verl_rollout_corr import correct
from verl_rollout_corr.hooks.wire import APPLIED_METRIC
from verl_rollout_corr.maths import inputs, losses

PROMPT = torch.tensor([3, 4])


def row(log_ratios: list[float], mask: list[int], advantage: float) -> tuple[Row, Tensor]:
    """A row whose engine gave every token log mu = -2, and the current log-probs that make these log-ratios."""
    length = len(mask)
    columns = {"old_log_probs": torch.full((length,), -2.0), "advantages": torch.full((length,), advantage)}
    return Row(PROMPT, torch.full((length,), 5), torch.tensor(mask), columns), torch.tensor(log_ratios) - 2.0


# Row 0: product e^0.3, row 1: product e^1.0 (above 2), row 2: a tool token with an absurd ratio between two turns.
CASES = [row([0.1, 0.2], [1, 1], 1.0), row([0.5, 0.5], [1, 1], -2.0), row([0.1, 9.0, -0.1], [1, 0, 1], 3.0)]
ROWS, CURRENT = [case[0] for case in CASES], [case[1] for case in CASES]
TOKENS = 6


def gradients(monkeypatch: pytest.MonkeyPatch, mapping: dict[str, Any], **actor: Any) -> list[list[float]]:
    """Times the number of response tokens, which token-mean divides by."""
    config = direct.configuration({"mode": "bypass"} | mapping, monkeypatch, **actor)
    found = direct.call(config, ROWS, log_probs=CURRENT)
    return [(gradient * TOKENS).tolist() for gradient in found.gradients]


def expect(found: list[list[float]], *rows: list[float]) -> None:
    for one, other in zip(found, rows, strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-7)


E = torch.e


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({"level": "token"}, [[E**0.1, E**0.2], [E**0.5, E**0.5], [E**0.1, 0, E**-0.1]]),
        ({"level": "seq_sum", "upper": 2.0}, [[E**0.3] * 2, [2.0] * 2, [1.0, 0, 1.0]]),
        ({"level": "seq_mean"}, [[E**0.15] * 2, [E**0.5] * 2, [1.0, 0, 1.0]]),
        ({"level": "turn_sum"}, [[E**0.3] * 2, [E**1.0] * 2, [E**0.1, 0, E**-0.1]]),
        ({"level": "prefix_sum"}, [[E**0.1, E**0.3], [E**0.5, E**1.0], [E**0.1, 0, 1.0]]),
        ({"level": "token", "upper": 1.2, "outside": "mask"}, [[E**0.1, 0], [0, 0], [E**0.1, 0, E**-0.1]]),
        ({"level": None}, [[1, 1], [1, 1], [1, 0, 1]]),
    ],
)
def test_reinforce(monkeypatch: pytest.MonkeyPatch, weights: dict[str, Any], expected: list[list[float]]) -> None:
    """-w A: the weight is not differentiated, and tool tokens have none."""
    found = gradients(monkeypatch, {"loss": "reinforce", "weights": weights})
    expect(found, *([-weight * a for weight in row] for row, a in zip(expected, (1.0, -2.0, 3.0), strict=True)))


def test_half_precision_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the loss: the trainer sees no log-probs of its own in bypass mode."""
    monkeypatch.setattr(inputs, "_warned_half", False)
    config = direct.configuration({"mode": "bypass"}, monkeypatch)
    rows = [one.having(old_log_probs=one.columns["old_log_probs"].bfloat16()) for one in ROWS]
    with pytest.warns(UserWarning, match=r"log-probs came as torch\.bfloat16"):
        direct.call(config, rows, log_probs=CURRENT)


def test_reinforce_with_rejection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 1's geometric mean e^0.5 is out; the others are divided by all tokens still."""
    mapping = {"loss": "reinforce", "weights": {"level": "token"}, "reject": {"seq_mean_k1": {"upper": 1.5}}}
    expect(gradients(monkeypatch, mapping), [-(E**0.1), -(E**0.2)], [0, 0], [-3 * E**0.1, 0, -3 * E**-0.1])


def test_ppo_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    """-r A while unclipped: 1.22 > 1 + 0.2 is clipped for A > 0, 1.65 is not for A < 0."""
    expect(
        gradients(monkeypatch, {}),
        [-(E**0.1), 0],
        [2 * E**0.5, 2 * E**0.5],
        [-3 * E**0.1, 0, -3 * E**-0.1],
    )


def test_ppo_clip_asymmetric_and_dual(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's clip_ratio_high, and clip_ratio_c for a negative advantage."""
    found = gradients(monkeypatch, {}, clip_ratio_high=0.3, clip_ratio_c=1.5)
    expect(found, [-(E**0.1), -(E**0.2)], [0, 0], [-3 * E**0.1, 0, -3 * E**-0.1])


def test_ppo_clip_with_rejection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token criterion takes its tokens only, before any clipping."""
    found = gradients(monkeypatch, {"reject": {"token_k1": {"lower": 0.95, "upper": 1.5}}})
    expect(found, [-(E**0.1), 0], [0, 0], [-3 * E**0.1, 0, 0])


def test_the_sign_of_the_advantage_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """`when: negative_advantage`: the same mismatch is kept in row 0 and rejected in row 1."""
    mapping = {"loss": "reinforce", "reject": {"seq_mean_k1": {"upper": 1.01, "when": "negative_advantage"}}}
    expect(gradients(monkeypatch, mapping), [-1, -1], [0, 0], [-3, 0, -3])


@pytest.mark.parametrize("mode", losses.AGGREGATION_MODES)
@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce"])
def test_the_maths_has_the_same_loss(monkeypatch: pytest.MonkeyPatch, loss: str, mode: str) -> None:
    """What `verl_rollout_corr.maths.losses` says of a batch in one piece, with weights and rejected tokens."""
    mapping = {"mode": "bypass", "loss": loss, "reject": {"token_k1": {"lower": 0.95, "upper": 1.5}}}
    if loss == "reinforce":
        mapping |= {"weights": {"level": "token", "upper": 1.15}}
    config = direct.configuration(mapping, monkeypatch, loss_agg_mode=mode, loss_scale_factor=7)
    found = direct.call(config, ROWS, log_probs=CURRENT).loss

    def stacked(columns: list[Tensor]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(columns, batch_first=True)

    log_prob, mask = stacked(CURRENT), stacked([one.mask for one in ROWS])
    mu, advantages = (stacked([one.columns[name] for one in ROWS]) for name in ("old_log_probs", "advantages"))
    result = correct(log_prob, mu, mask, mapping)
    per_token = (
        losses.reinforce(log_prob, result.weights, advantages)
        if loss == "reinforce"
        else losses.ppo_clip(log_prob, mu, advantages, clip_low=0.2, clip_high=0.2, clip_c=3.0)
    )
    assert 0 < int(result.keep.sum()) < TOKENS
    expected = losses.aggregate(per_token, mask, result.keep, mode, scale=7)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("mapping", "clipped"),
    [
        ({"loss": "ppo_clip"}, 1),  # e^0.2 in row 0; in row 1 the advantage pulls the ratio back
        ({"loss": "ppo_clip", "reject": {"seq_sum_k1": {"upper": 1.3}}}, 0),  # row 0 is rejected
        ({"loss": "reinforce"}, 0),
    ],
)
def test_what_the_clip_silences_is_counted(
    monkeypatch: pytest.MonkeyPatch, mapping: dict[str, Any], clipped: int
) -> None:
    """By the loss, from the ratios before rejected tokens are neutralised; the tool's token counts nowhere."""
    config = direct.configuration({"mode": "bypass"} | mapping, monkeypatch)
    found = direct.call(config, ROWS, log_probs=CURRENT)
    assert found.metrics[APPLIED_METRIC].content.clipped == clipped
    inside = [gradient[one.mask.bool()] for gradient, one in zip(found.gradients, ROWS, strict=True)]
    silent = sum(int((gradient == 0).sum()) for gradient in inside)
    assert silent == TOKENS - found.metrics[APPLIED_METRIC].content.kept + clipped
