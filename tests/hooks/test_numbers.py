"""NaN and inf at tokens that training may not use reach no loss, no gradient and no metric."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hooks import direct
from hooks.rows import Row, undecided
from hooks.test_gradients import MODES, WEIGHTED
from verl_rollout_corr import finalize
from verl_rollout_corr.hooks.transport import Carried
from verl_rollout_corr.hooks.wire import APPLIED_METRIC, SUMS_METRIC

TERMS: dict[str, Any] = {"entropy_coeff": 0.05, "use_kl_loss": True, "kl_loss_coef": 0.1, "loss_scale_factor": 12}
BAD = [float("nan"), float("inf"), -float("inf")]
FLOATS = ("old_log_probs", "ref_log_prob", "advantages", "rollout_is_weights", "rollout_log_probs")


def spoiled(rows: list[Row], value: float, *, rejected: bool) -> tuple[list[Row], list[Tensor]]:
    """Rows and current log-probs with `value` wherever a token is not kept (or only where the mask is 0)."""
    current = direct.current(rows)
    changed = []
    for number, row in enumerate(rows):
        bad = row.columns["rollout_corr_keep"] == 0 if rejected else row.mask == 0
        columns = {
            name: torch.where(bad, torch.full_like(row.columns[name], value), row.columns[name])
            for name in FLOATS
            if name in row.columns
        }
        current[number] = torch.where(bad, torch.full_like(current[number], value), current[number])
        changed.append(row.having(**columns))
    return changed, current


def same(found: direct.Result, expected: direct.Result) -> None:
    """Bit for bit the same loss and gradient, and finite metrics."""
    assert torch.isfinite(found.loss) and torch.equal(found.loss, expected.loss)
    for one, other in zip(found.gradients, expected.gradients, strict=True):
        assert torch.equal(one, other)
    for name, value in found.metrics.items():
        if not isinstance(value, Carried):
            assert math.isfinite(value.aggregate() if hasattr(value, "aggregate") else value), name


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("denominator", ["all", "kept"])
@pytest.mark.parametrize("mode", MODES)
def test_decoupled(
    monkeypatch: pytest.MonkeyPatch, decided: list[Row], mode: str, denominator: str, value: float
) -> None:
    """At rejected tokens, at tool tokens, and in V0's padding."""
    config = direct.configuration(WEIGHTED | {"denominator": denominator}, monkeypatch, loss_agg_mode=mode, **TERMS)
    counts = {"tokens": 40, "sequences": 7}
    expected = direct.call(config, decided, entropy=True, **counts)
    rows, current = spoiled(decided, value, rejected=True)
    for form in ("queue", "padded"):
        found = direct.call(config, rows, log_probs=current, entropy=True, form=form, fill=value, **counts)
        same(found, expected)
    assert any(gradient.any() for gradient in expected.gradients)


def test_verl_alone_lets_them_through(monkeypatch: pytest.MonkeyPatch, decided: list[Row]) -> None:
    """What the seam is for: verl multiplies by the mask."""
    config = direct.configuration(None, monkeypatch, loss_agg_mode="seq-mean-token-sum")
    rows, current = spoiled(decided, float("nan"), rejected=False)
    found = direct.call(config, rows, log_probs=current, function=direct.losses.ppo_loss)
    assert torch.isnan(found.loss)


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce"])
@pytest.mark.parametrize("mode", MODES)
def test_bypass_outside_the_mask(
    monkeypatch: pytest.MonkeyPatch, decided: list[Row], mode: str, loss: str, value: float
) -> None:
    """Tool tokens: engines write NaN, 0 or nothing there."""
    mapping = {"mode": "bypass", "loss": loss, "reject": {"token_k1": {"lower": 0.9, "upper": 1.2}}}
    mapping |= {"weights": {"level": "seq_sum", "upper": 2.0}} if loss == "reinforce" else {}
    config = direct.configuration(mapping, monkeypatch, loss_agg_mode=mode, **TERMS)
    decided = undecided(decided)
    expected = direct.call(config, decided, entropy=True)
    rows, current = spoiled(decided, value, rejected=False)
    for form in ("queue", "padded"):
        found = direct.call(config, rows, log_probs=current, entropy=True, form=form, fill=value)
        same(found, expected)
        assert finalize(found.metrics[SUMS_METRIC].content) == finalize(expected.metrics[SUMS_METRIC].content)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.5])
@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce"])
def test_bypass_invalid_at_a_response_token(
    monkeypatch: pytest.MonkeyPatch, drawn: list[Row], loss: str, value: float
) -> None:
    """`invalid: reject`: the row is rejected and counted, and the others train as if it carried anything else."""
    mapping = {"mode": "bypass", "loss": loss, "invalid": "reject"}
    config = direct.configuration(mapping, monkeypatch, **TERMS)
    current = direct.current(drawn)
    old = drawn[0].columns["old_log_probs"].clone()
    old[1] = value
    rows = [drawn[0].having(old_log_probs=old), *drawn[1:]]
    found = direct.call(config, rows, log_probs=current, entropy=True)
    assert torch.isfinite(found.loss) and not found.gradients[0].any()
    whole = direct.call(config, drawn, log_probs=current, entropy=True)
    for one, other in zip(found.gradients[1:], whole.gradients[1:], strict=True):
        torch.testing.assert_close(one, other)
    metrics = finalize(found.metrics[SUMS_METRIC].content)
    assert metrics["rollout_corr/invalid_seq_fraction"] == pytest.approx(1 / len(drawn))
    assert all(math.isfinite(number) for number in metrics.values())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bypass_invalid_forward_pass(monkeypatch: pytest.MonkeyPatch, drawn: list[Row], value: float) -> None:
    """The current policy's own log-prob is no log-prob: that row is rejected, the others train."""
    config = direct.configuration({"mode": "bypass", "invalid": "reject"}, monkeypatch, **TERMS)
    current = direct.current(drawn)
    current[2][0] = value
    found = direct.call(config, drawn, log_probs=current, entropy=True)
    assert torch.isfinite(found.loss) and not found.gradients[2].any() and found.gradients[3].any()


@pytest.mark.parametrize(
    "mapping",
    [
        {"mode": "bypass"},
        {"mode": "bypass", "loss": "reinforce", "weights": {"level": "token", "upper": 2.0}},
        {"mode": "bypass", "loss": "reinforce", "weights": {"level": "seq_sum", "upper": 2.0}},
    ],
)
def test_bypass_log_pi_of_minus_infinity_is_legal(
    monkeypatch: pytest.MonkeyPatch, drawn: list[Row], mapping: dict[str, Any]
) -> None:
    """r = 0: the weight is 0, and 0 times -inf is 0 in the loss and in the gradient."""
    config = direct.configuration(mapping, monkeypatch)
    current = direct.current(drawn)
    current[1][3] = -float("inf")
    found = direct.call(config, drawn, log_probs=current)
    assert torch.isfinite(found.loss)
    assert all(torch.isfinite(gradient).all() for gradient in found.gradients)
    assert found.gradients[1][3] == 0 and found.gradients[0].any()


@pytest.mark.parametrize("mode", MODES)
def test_a_token_that_pi_old_gives_no_probability(
    monkeypatch: pytest.MonkeyPatch, decided: list[Row], mode: str
) -> None:
    """Legal, and kept: -inf - (-inf) is no number, so the token adds 0 and counts, as one with advantage 0 does."""
    config = direct.configuration(WEIGHTED, monkeypatch, loss_agg_mode=mode, loss_scale_factor=12)
    current = direct.current(decided)
    at = next(
        (row, int(place)) for row, one in enumerate(decided) for place in one.columns["rollout_corr_keep"].nonzero()
    )
    row, place = at
    old, advantages = (decided[row].columns[name].clone() for name in ("old_log_probs", "advantages"))
    advantages[place] = 0.0
    silent = [one.having(advantages=advantages) if i == row else one for i, one in enumerate(decided)]
    expected = direct.call(config, silent, log_probs=current)
    old[place] = -math.inf
    impossible = [one.having(old_log_probs=old) if i == row else one for i, one in enumerate(decided)]
    both = [value.clone() for value in current]
    both[row][place] = -math.inf
    for log_probs in (current, both):
        found = direct.call(config, impossible, log_probs=log_probs)
        same(found, expected)
        assert found.metrics[APPLIED_METRIC].content.kept == expected.metrics[APPLIED_METRIC].content.kept
