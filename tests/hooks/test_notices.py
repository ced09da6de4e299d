"""What a run is warned of: each kind when it happens, once, and nothing when nothing does."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl_rollout_corr import correct, load_preset
from verl_rollout_corr.grammar import Loss, Mode, RolloutCorrConfig
from verl_rollout_corr.hooks import notices
from verl_rollout_corr.hooks.applied import Applied
from verl_rollout_corr.maths.losses import clipped

K3 = load_preset("k3_rs")
BYPASS = load_preset("bypass_ppo_clip")


def sampling(top_p: float = 1.0, top_k: int = -1) -> Any:
    """The part of verl's configuration that the notices read."""
    return SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(top_p=top_p, top_k=top_k)))


def update(
    log_ratio: list[list[float]],
    ours: RolloutCorrConfig = K3,
    *,
    mask: list[list[int]] | None = None,
    rollout: list[list[float]] | None = None,
    ranks: tuple[int, ...] | None = None,
    config: Any = None,
    advantage: float = 1.0,
    staleness: list[int] | None = None,
    **more: int,
) -> notices.Line:
    """An update whose micro-batches are single rows, each on its rank; all tokens have one advantage; clip .2."""
    gap = torch.tensor(log_ratio, dtype=torch.float64)
    mu = torch.full_like(gap, -5.0) if rollout is None else torch.tensor(rollout, dtype=torch.float64)
    marks = torch.ones_like(gap).long() if mask is None else torch.tensor(mask)
    result = correct(mu + gap, mu, marks, ours, staleness=staleness)
    applied = Applied({})
    beyond = None
    if ours.mode is Mode.BYPASS and ours.loss is Loss.PPO_CLIP:
        beyond = clipped(mu + gap, mu, torch.full_like(gap, advantage), clip_low=0.2, clip_high=0.2)
    for row, rank in enumerate(ranks or (0,) * len(gap)):
        one = slice(row, row + 1)
        cut = None if beyond is None else beyond[one]
        weights = None if result.weights is None else result.weights[one]
        applied = applied + Applied.to_micro_batch(rank, marks[one].bool(), result.keep[one].bool(), weights, cut)
    share = applied.clipped / applied.kept if applied.kept else 0.0
    values = result.metrics | {"rollout_corr/applied_clipped_fraction": share}
    return notices.Line(config or sampling(), ours, applied, values, **more)


def said(happened: notices.Line, capsys: pytest.CaptureFixture[str]) -> list[str]:
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
    ours = load_preset("k3_rs", ["rollout_corr.invalid=reject"])
    lines = said(update([[0.0, 0.0], [0.0, 0.0]], ours, rollout=[[-1.0, -1.0], [float("nan"), -1.0]]), capsys)
    assert any("50.00% of the sequences" in line and "cannot be one" in line for line in lines)


@pytest.mark.parametrize(("lags", "warns"), [([-1, -1], True), ([-1, 0], False)])
def test_lags_that_nobody_knows(lags: list[int], warns: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """The criterion lag judged nothing; without it there is nothing to say."""
    ours = load_preset("metrics_only", "+reject.lag.upper=1")
    found = said(update([[0.0], [0.0]], ours, staleness=lags), capsys)
    assert [line for line in found if "reject.lag let every row of an update pass" in line] == found
    assert bool(found) is warns
    assert said(update([[0.0], [0.0]], staleness=[-1, -1]), capsys) == []


def test_a_batch_of_invalid_log_probs_was_rejected_by_no_bound(capsys: pytest.CaptureFixture[str]) -> None:
    """So nothing points to the bounds."""
    ours = load_preset("k3_rs", ["rollout_corr.invalid=reject"])
    (line,) = said(update([[0.0, 0.0]], ours, rollout=[[float("nan"), -1.0]]), capsys)
    assert "100.00% of the sequences" in line


@pytest.mark.parametrize(("denominator", "words"), [("all", "weigh no more"), ("kept", "weigh more")])
def test_what_an_empty_micro_batch_means_for_the_others(
    denominator: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = load_preset("k3_rs", [f"rollout_corr.denominator={denominator}"])
    (line,) = said(update([[0.0, 0.0], [4.0, 4.0]], ours), capsys)
    assert words in line


@pytest.mark.parametrize("config", [sampling(top_p=0.8), sampling(top_k=5)])
def test_zeros_of_truncated_sampling_have_a_likelier_cause(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """One candidate is left, and its probability is 1."""
    ours = load_preset("metrics_only")
    (line,) = said(update([[-0.3, 0.0]], ours, rollout=[[0.0, -1.0]], config=config), capsys)
    assert "top_p or top_k left one candidate" in line


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
    ("gap", "advantage", "ours", "warned"),
    [
        (0.19, 1.0, BYPASS, True),  # the case: r = 1.209 with clip .2, and nothing is learned
        (0.18, 1.0, BYPASS, False),  # r = 1.197
        (0.19, -1.0, BYPASS, False),  # the clip does not hold back what makes the token less likely
        (-0.23, -1.0, BYPASS, True),  # r = .795
        (0.19, 1.0, load_preset("bypass_reinforce"), False),  # no clip
    ],
)
def test_case_42_a_gap_that_spends_the_clip(
    gap: float, advantage: float, ours: RolloutCorrConfig, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron-LM PR 76: +.19 under bypass with clip .2, for a quarter of the tokens."""
    lines = said(update([[gap, 0.0, 0.0, 0.0]], ours, advantage=advantage), capsys)
    assert bool(lines) is warned
    if warned:
        assert "silences 25% of the kept tokens" in lines[0] and "applied_clipped_fraction" in lines[0]


@pytest.mark.parametrize(
    ("estimator", "baseline", "warned"), [("gae", "kept", True), ("grpo", "kept", False), ("gae", "all", False)]
)
def test_a_baseline_without_groups(
    estimator: str, baseline: str, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    config = sampling()
    config.algorithm = SimpleNamespace(adv_estimator=estimator)
    ours = load_preset("k3_rs", [f"rollout_corr.baseline={baseline}"])
    lines = said(update([[0.0, 0.0]], ours, config=config), capsys)
    assert [f"changes nothing with algorithm.adv_estimator={estimator}" in line for line in lines] == [True] * warned


def test_case_42_sibling_rejected_rows_spend_no_clip(capsys: pytest.CaptureFixture[str]) -> None:
    """The mismatch is that of a row that is not trained on."""
    ours = load_preset("bypass_ppo_clip_k3_rs")
    lines = said(update([[2.0, 2.0], [0.0, 0.0], [0.0, 0.0]], ours), capsys)
    assert not any("clip" in line for line in lines)


def test_case_48_one_log_prob_for_every_token(capsys: pytest.CaptureFixture[str]) -> None:
    """With `invalid: reject` the run goes on, and the rows are corrected as they are."""
    ours = load_preset("metrics_only", ["rollout_corr.invalid=reject"])
    gap = [[-0.01 * place for place in range(8)], [0.0] * 8]
    lines = said(update(gap, ours, rollout=[[-1.0] * 8, [-1.0 - 0.1 * place for place in range(8)]]), capsys)
    assert ["50.00% of the rows of a batch have one log-prob" in line for line in lines] == [True]


@pytest.mark.parametrize(
    ("preset", "gap", "words"),
    [("seq_is", -0.2, "level=seq_mean"), ("token_is", -3.5, "far less probability"), ("seq_is", -0.1, None)],
)
def test_case_51_weights_that_silence_the_update(
    preset: str, gap: float, words: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """A product over 20 tokens is e^-4 = .018 or e^-2 = .14; one token's is e^-3.5 = .03."""
    lines = said(update([[gap] * 20], load_preset(preset)), capsys)
    assert len(lines) == (words is not None)
    if words is not None:
        assert "of the kept tokens are 0.0" in lines[0] and words in lines[0] and "applied_weight" in lines[0]


TWO_TURNS = [[1] * 20 + [0] + [1] * 20]


@pytest.mark.parametrize(
    ("ours", "gap", "words"),
    [
        (load_preset("turn_is", ["weights.level=turn_sum"]), -0.2, "level=turn_mean (turn_is)"),
        (load_preset("turn_is", ["weights.level=turn_sum"]), -0.1, None),
        (load_preset("turn_is"), -0.2, None),
        (load_preset("turn_is"), -3.5, "far less probability"),
        (load_preset("prefix_is"), -0.5, "level=seq_mean"),
        (load_preset("bypass_reinforce"), -0.1, "level=seq_mean"),
        (load_preset("bypass_reinforce"), -0.05, None),
        (load_preset("bypass_reinforce_token_icepop", ["weights.lower=0.001"]), -3.5, "far less probability"),
    ],
    ids=lambda value: f"{value.weights.level}_{value.mode}" if isinstance(value, RolloutCorrConfig) else None,
)
def test_case_51_sibling_in_turns_and_in_bypass_mode(
    ours: RolloutCorrConfig, gap: float, words: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two turns of 20 tokens: a product over a turn is e^-4 or e^-2, over both e^-4 or e^-2 at half the gap. Those of
    prefixes are e^-0.5 to e^-20, .04 in the mean.
    """
    lines = [line for line in said(update([[gap] * 41], ours, mask=TWO_TURNS), capsys) if "k3 per token" not in line]
    assert len(lines) == (words is not None)
    assert all(words in line and "of the kept tokens are 0.0" in line for line in lines)


@pytest.mark.parametrize(("k3", "warned"), [(0.51, True), (0.5, False), (None, False)])
def test_case_67_two_sides_that_do_not_describe_the_same_tokens(
    k3: float | None, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = said(dataclasses.replace(update([[0.0, 0.0]]), fresh_k3=k3), capsys)
    assert ["k3 per token is 0.51 for samples" in line for line in lines] == [True] * warned
