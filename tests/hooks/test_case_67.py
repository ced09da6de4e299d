"""Case 67 as it was injected, and its siblings: an engine whose log-probs are a constant, shifted by a token, or a
stand-in for "no log-prob". In the trainers of both kinds, and in bypass mode in verl's own worker, before its step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hooks import trainers
from hooks.actor import Job
from hooks.pool import Pool
from hooks.rows import Row
from hooks.test_faults import BYPASS, in_bypass, refused
from verl_rollout_corr.errors import InputError
from verl_rollout_corr.hooks.entrance import constant_rows
from verl_rollout_corr.hooks.weight_versions import history_of

TOKEN_IS: dict[str, Any] = {"weights": {"level": "token", "upper": 2.0}}


def rows() -> dict[str, list[Tensor]]:
    """Four responses of 16 tokens with log-probs of a mean of -2.87 on both sides (e^-2.87 = .057), hardly apart."""
    generator = torch.Generator().manual_seed(67)
    train = [-2.87 + 1.4 * (torch.rand(16, generator=generator) - 0.5) for _ in range(4)]
    return {
        "response_mask": [torch.ones(16, dtype=torch.int64) for _ in train],
        "responses": [torch.arange(16) for _ in train],
        "old_log_probs": train,
        "rollout_log_probs": [row + 1e-3 * torch.randn(16, generator=generator) for row in train],
        "advantages": [torch.full((16,), (-1.0) ** number) for number in range(4)],
    }


def update(found: dict[str, list[Tensor]], mapping: dict[str, Any], form: str, patch: pytest.MonkeyPatch) -> Any:
    return trainers.update_v1(found, mapping, patch) if form == "v1" else trainers.update_v0(found, mapping)


@pytest.mark.parametrize("form", ["v1", "v0"])
def test_as_injected(form: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sound, changed = rows(), rows()
    update(sound, TOKEN_IS, form, monkeypatch)
    changed["rollout_log_probs"] = [torch.zeros(16) for _ in range(4)]
    with pytest.raises(InputError, match=r"4 of 4 rows of a batch have one log-prob .*\(the first is row 0\)"):
        update(changed, TOKEN_IS, form, monkeypatch)
    changed = rows()
    for row in changed["rollout_log_probs"]:
        row[5] = -9999.0
    with pytest.raises(InputError, match=r"rollout_log_probs is -9999\.0 at row 0, position 5: 4 of 64"):
        update(changed, TOKEN_IS, form, monkeypatch)
    assert "warning" not in capsys.readouterr().out


def test_shifted_by_one_warns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shifted = rows()
    for name in ("old_log_probs", "rollout_log_probs"):
        shifted[name] = [2.2 * row for row in shifted[name]]
    shifted["rollout_log_probs"] = [row.roll(1) for row in shifted["rollout_log_probs"]]
    workers = trainers.Workers()
    history_of(workers).publish(0)
    monkeypatch.setattr(trainers, "Workers", lambda: workers)
    metrics, _ = trainers.update_v1(shifted, TOKEN_IS, monkeypatch)
    assert metrics["rollout_corr/k3_kl"] > 0.5
    assert "engine and trainer do not describe the same tokens" in capsys.readouterr().out


def test_two_sides_that_are_sure_are_not_a_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    """A response of certain tokens: the engine's float32 has 0.0 where the trainer's has -2e-7, as in case 52."""
    sure = rows()
    sure["old_log_probs"] = [torch.where(torch.arange(16) % 3 == 0, -2e-7, 0.0) for _ in range(4)]
    sure["rollout_log_probs"] = [torch.zeros(16) for _ in range(4)]
    metrics, _ = trainers.update_v1(sure, TOKEN_IS, monkeypatch)
    assert metrics["rollout_corr/constant_rollout_row_fraction"] == 1.0
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("train", "rollout", "mask", "constant"),
    [
        ([-0.5] * 7 + [-0.6], [0.0] * 8, [1] * 8, True),
        ([-0.5] * 7 + [-0.6], [-1.0] * 8, [1] * 8, True),
        ([-0.5] * 6 + [-0.6, -0.7], [-1.0] * 7 + [-2.0], [1] * 7 + [0], False),  # of 7 tokens
        ([-0.5] * 8 + [-0.6], [-1.0] * 8 + [-2.0], [1] * 8 + [0], False),  # the trainer's are equal too
        ([-0.5] * 7 + [-0.6, 0.0], [-1.0] * 8 + [7.0], [1] * 8 + [0], True),  # beside padding
        ([-0.5] * 7 + [-0.6], [-1.0] * 7 + [-1.001], [1] * 8, False),
        ([-1e-4] * 7 + [-9e-4], [0.0] * 8, [1] * 8, False),
        ([-1e-4] * 7 + [-2e-3], [0.0] * 8, [1] * 8, True),
        ([float("-inf")] + [-0.5] * 7, [-0.5] * 8, [1] * 8, True),
        ([], [], [], False),
    ],
)
def test_constant_rows(train: list[float], rollout: list[float], mask: list[int], constant: bool) -> None:
    found = constant_rows(torch.tensor([train]), torch.tensor([rollout]), torch.tensor([mask]))
    assert found.tolist() == [constant]


@pytest.mark.parametrize("constant", [0.0, -1.0])
def test_in_bypass_mode_before_the_step(pools: dict[int, Pool], drawn: list[Row], constant: float) -> None:
    """Only the worker knows the trainer's log-probs there."""
    engine = [row.having(rollout_log_probs=torch.full((len(row.mask),), constant)) for row in drawn]
    first = next(number for number, row in enumerate(engine) if int(row.mask.sum()) >= 8)
    message = rf"rows of a mini-batch of this process have one log-prob .*\(the first is row {first}\)"
    refused(pools[1], Job(in_bypass(engine), BYPASS, micro=2), message)
    pools[1].run(Job(in_bypass(engine), BYPASS | {"invalid": "reject"}, micro=2))
