"""Agents in V1, for real: turns with a tool between them, sessions of several rows, rows without a trainable token, and
the padding rows with which verl fills up such a batch.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from e2e import checks, independent, reading
from e2e.conftest import Launch
from e2e.launch import Finished
from e2e.records import Row, Step
from e2e.settings import ACTOR, MODULES, ROLLOUT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(0)]

BOUND = 4e-5
"""About the median of turns sampled in BF16, in any draw: of a few turns, some are on either side."""

AGENTS: dict[str, Any] = {
    # The policy hardly moves within a step: bypass mode judges the second mini-batch as the first.
    f"{ACTOR}.optim.lr": 1e-6,
    f"{ROLLOUT}.agent.agent_loop_config_path": MODULES / "e2e_agents.yaml",
    f"{ROLLOUT}.agent.default_agent_loop": "e2e_agents",
    # The second row of a session starts from the first row's prompt, a turn and the tool's answer.
    "data.max_prompt_length": 20,
    f"{ROLLOUT}.max_model_len": 40,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "agents": {"+rollout_corr": "[token_is]", "+rollout_corr.reject.turn_mean_k3.upper": BOUND},
    "agents_bypass": {
        "+rollout_corr": "[bypass_reinforce]",
        "+rollout_corr.reject.turn_mean_k3.upper": BOUND,
        f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
    },
}
STEPS = 2
PROMPTS = 8
TRAINABLE = 5 * PROMPTS
"""Rows with a token of the policy: one of the sessions 0, 1 and 3, two of session 2."""
PADDED = 64
"""Six rows of each prompt, filled up to whole mini-batches of 8 prompts x 4 samples."""
TOOL = 3
HORIZON = 12
"""`data.max_response_length` of the recipe."""


@pytest.fixture(scope="session", params=VARIANTS)
def ran(request: pytest.FixtureRequest, start: Launch) -> Finished:
    return start(request.param, STEPS, AGENTS | VARIANTS[request.param])


@pytest.fixture
def logged(ran: Finished) -> dict[int, dict[str, float]]:
    return checks.green(ran, STEPS)


@pytest.fixture
def seen(ran: Finished) -> dict[int, Step]:
    return checks.updates(ran, STEPS)


def test_only_rows_with_a_token_of_the_policy_are_corrected(ran: Finished, seen: dict[int, Step]) -> None:
    for step in seen.values():
        assert len(step.rows) == TRAINABLE
        assert sum(len(micro) for micro in step.micro_batches) == PADDED
        with_tool = [row for row in step.rows if not row.mask.all()]
        assert len(with_tool) == PROMPTS
        for row in with_tool:
            assert row.rollout is not None
            assert (~row.mask).sum() == TOOL and (row.rollout[~row.mask] == 0).all()


def test_weights_and_keep_in_the_loss_are_the_oracles(ran: Finished, seen: dict[int, Step]) -> None:
    for step in seen.values():
        checks.applied(step, checks.decided(step))


def test_a_turn_is_rejected_as_a_whole_and_alone(ran: Finished, seen: dict[int, Step]) -> None:
    """In some row the turn before the tool stays and the one after it does not, or the other way round."""
    split = 0
    for step in seen.values():
        for row in step.rows:
            kept = [set(turn) for turn in _turns(row)]
            assert all(len(states) == 1 for states in kept)
            split += len(kept) == 2 and kept[0] != kept[1]
    assert split > 0, "move the bound: no row is split"


def _turns(row: Row) -> list[list[bool]]:
    """keep of the policy's tokens, turn by turn."""
    turns: list[list[bool]] = []
    before = False
    for inside, keep in zip(row.mask.tolist(), row.keep.tolist(), strict=True):
        if inside and not before:
            turns.append([])
        if inside:
            turns[-1].append(keep)
        before = inside
    return turns


def test_a_session_keeps_its_advantage_where_its_last_row_is_rejected(ran: Finished, seen: dict[int, Step]) -> None:
    """The rows of session 2 have one advantage, whatever was rejected; some session lost its last row."""
    lost_last = 0
    for step in seen.values():
        for first, last in _sessions_of_two(step):
            assert first.columns["advantages"][first.mask].unique().tolist() == [
                float(last.columns["advantages"][last.mask][0])
            ]
            lost_last += not bool(last.keep[last.mask].any())
    assert lost_last > 0, "move the bound: no session lost its last row"


def _sessions_of_two(step: Step) -> list[tuple[Row, Row]]:
    """The two rows of each session 2: the prompt of the last continues all that the first saw."""
    by_prompt: dict[tuple[int, ...], list[Row]] = defaultdict(list)
    for row in step.rows:
        by_prompt[tuple(row.input_ids[: row.prompt].tolist())].append(row)
    pairs = []
    shortest = min(row.prompt for row in step.rows)
    for last in step.rows:
        if last.prompt > shortest:
            firsts = [row for row in step.rows if row.key == last.key[: last.prompt - TOOL] and row.prompt == shortest]
            pairs += [(firsts[0], last)] if len(firsts) == 1 else []
    assert len(pairs) >= PROMPTS // 2
    return pairs


def test_the_tracker_has_the_metrics_of_the_whole_batch(
    ran: Finished, logged: dict[int, dict[str, float]], seen: dict[int, Step]
) -> None:
    for number, step in seen.items():
        checks.tracker(step, checks.decided(step), logged[number])


def test_the_tools_tokens_are_in_no_metric(
    ran: Finished, logged: dict[int, dict[str, float]], seen: dict[int, Step]
) -> None:
    """The KL is that of the policy's tokens. The tool's, with their log-prob 0.0, would change it by a lot."""
    for number, step in seen.items():
        train = checks.train_log_probs(step)
        gaps = [row.rollout.double() - log_prob.double() for row, log_prob in zip(step.rows, train, strict=True)]
        policys = torch.cat([gap[row.mask] for gap, row in zip(gaps, step.rows, strict=True)]).mean()
        everything = torch.cat(gaps).mean()
        kl = logged[number]["rollout_corr/kl"]
        assert kl == pytest.approx(float(policys), rel=1e-5, abs=1e-8)
        assert abs(kl - float(everything)) > 0.1
        assert logged[number]["rollout_corr/exact_zero_rollout_fraction"] == 0.0


def test_a_warning_says_what_was_left_out(ran: Finished) -> None:
    text = reading.plain(ran.log)
    assert text.count("[rollout_corr] warning: verl filled a batch up with 16 padding rows") == 1
    assert text.count(f"[rollout_corr] warning: {PROMPTS} rows of a batch have no response token") == 1


def test_the_first_update_computed_again(ran: Finished, model: Path, seen: dict[int, Step]) -> None:
    """The first of the step's two mini-batches. token-mean: over its response tokens. seq-mean-token-sum-norm: over its
    rows, those of verl's padding among them, and the longest response that the run allows.
    """
    step = seen[1].first_mini_batch(rows=PADDED // 2)
    norm = step.micro_batches[0].record["loss_agg_mode"] == "seq-mean-token-sum-norm"
    divisor = PADDED / 2 * HORIZON if norm else None
    again = independent.first_step(model, step, divisor=divisor)
    plain = independent.first_step(model, step, divisor=divisor, corrected=False)
    error = abs(step.loss - again.total)
    assert error < 2e-6
    assert abs(step.loss - plain.total) > max(20 * error, 1e-6)
