"""What a run is warned of: each kind when it happens, once, and nothing when nothing does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl_rollout_corr import correct, load_preset
from verl_rollout_corr.grammar import RolloutCorrConfig
from verl_rollout_corr.hooks import notices
from verl_rollout_corr.hooks.applied import Applied

K3 = load_preset("k3_rs")
BYPASS = load_preset("bypass_ppo_clip")


def actor(**settings: float | None) -> Any:
    """The part of verl's configuration that the notices read."""
    clip = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None} | settings
    return SimpleNamespace(actor_rollout_ref=SimpleNamespace(actor=SimpleNamespace(**clip)))


def update(
    log_ratio: list[list[float]],
    spec: RolloutCorrConfig = K3,
    *,
    mask: list[list[int]] | None = None,
    rollout: list[list[float]] | None = None,
    ranks: tuple[int, ...] | None = None,
    config: Any = None,
    **more: int,
) -> notices.Update:
    """An update whose micro-batches are single rows, each on its rank."""
    gap = torch.tensor(log_ratio, dtype=torch.float64)
    mu = torch.full_like(gap, -5.0) if rollout is None else torch.tensor(rollout, dtype=torch.float64)
    marks = torch.ones_like(gap).long() if mask is None else torch.tensor(mask)
    result = correct(mu + gap, mu, marks, spec)
    applied = Applied({})
    for row, rank in enumerate(ranks or (0,) * len(gap)):
        one = slice(row, row + 1)
        applied = applied + Applied.to_micro_batch(rank, marks[one].bool(), result.keep[one].bool(), None)
    return notices.Update(config or actor(), spec, applied, result.metrics, **more)


def said(happened: notices.Update, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of this update, after which the same update says nothing more."""
    given: set[str] = set()
    notices.give(happened, given)
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("[rollout_corr] warning: ") for line in lines)
    assert len(lines) == len(given)
    notices.give(happened, given)
    assert capsys.readouterr().out == ""
    return lines


def test_nothing_to_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(update([[0.01, -0.01], [0.02, 0.0]]), capsys) == []


def test_a_batch_that_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    """One line: that its ranks and micro-batches are empty too goes without saying."""
    (line,) = said(update([[3.0, -3.0], [4.0, 4.0]], ranks=(0, 1)), capsys)
    assert "every response token of a batch was rejected" in line and "rollout_rs_*_mean" in line


def test_a_rank_and_a_micro_batch_that_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(update([[0.0, 0.0], [4.0, 4.0], [0.0, 0.0], [4.0, 4.0]], ranks=(0, 1, 0, 1)), capsys)
    assert len(lines) == 2
    assert "of rank 1 was rejected" in lines[0] and "of 2 micro-batches" in lines[1]


def test_a_micro_batch_alone(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = said(update([[0.0, 0.0], [4.0, 4.0]]), capsys)
    assert "of 1 micro-batches" in line


def test_a_batch_without_a_token_is_not_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(update([[0.0, 0.0]], mask=[[0, 0]]), capsys) == []


def test_padding_and_untrainable_rows(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(update([[0.0, 0.0]], padding=2, untrainable=3), capsys)
    assert ["2 padding rows" in lines[0], "3 rows of a batch have no response token" in lines[1]] == [True, True]


def test_invalid_log_probs_that_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    """With `invalid: reject`."""
    spec = load_preset("k3_rs", ["rollout_corr.invalid=reject"])
    lines = said(update([[0.0, 0.0], [0.0, 0.0]], spec, rollout=[[-1.0, -1.0], [float("nan"), -1.0]]), capsys)
    assert any("50.00% of the sequences" in line and "no numbers" in line for line in lines)


@pytest.mark.parametrize(
    ("rollout", "log_ratio", "whose"), [(0.0, -10.8, "the engine"), (-10.8, 10.8, "the trainer")], ids=["mu", "pi"]
)
def test_case_20_exact_zeros_are_reported(
    rollout: float, log_ratio: float, whose: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the tokens carry 0.0 on one side where the other says -10.8."""
    happened = update([[log_ratio, 0.0]], load_preset("metrics_only"), rollout=[[rollout, -1.0]])
    (line,) = said(happened, capsys)
    assert "50.00% of the tokens" in line and f"on the side of {whose} only" in line


@pytest.mark.parametrize(
    ("gap", "spec", "settings", "warned"),
    [
        (0.19, BYPASS, {}, True),  # the case: every token is out of the clip
        (0.02, BYPASS, {}, False),
        (0.19, load_preset("bypass_reinforce"), {}, False),  # no clip
        (0.19, load_preset("metrics_only"), {}, False),  # pi_old is the trainer's own
        (0.19, BYPASS, {"clip_ratio_low": 0.5, "clip_ratio_high": 0.6}, False),
        (0.19, BYPASS, {"clip_ratio_high": 0.28}, True),  # the lower side is clip_ratio still
    ],
)
def test_case_42_a_gap_that_spends_the_clip(
    gap: float, spec: RolloutCorrConfig, settings: dict[str, float], warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron-LM PR 76: +.19 under bypass with clip .2."""
    lines = said(update([[gap, gap]], spec, config=actor(**settings)), capsys)
    assert bool(lines) is warned
    if warned:
        assert "0.209 from 1 on average" in lines[0] and "clip_ratio is 0.2" in lines[0]
