"""Rows, micro-batches, ranks and batches of which nothing is left: training goes on, and what is 0 is exactly 0."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hooks import reference
from hooks.actor import Answer, Engine, Job
from hooks.pool import Pool
from hooks.reference import Objective
from hooks.rows import RESPONSE_WIDTH, Row, padding_row
from hooks.test_gradients import MODES, WEIGHTED, actor, compare, objective_of
from verl_rollout_corr import finalize
from verl_rollout_corr.hooks.transport import gather
from verl_rollout_corr.hooks.wire import APPLIED_METRIC, SUMS_METRIC

HORIZON = {"rollout_corr_horizon": RESPONSE_WIDTH}


def untrainable(row: Row) -> Row:
    """An agent's row in which the policy produced no token."""
    empty = torch.zeros_like(row.mask)
    columns = {
        name: value * 0 if "rollout" in name and "log" not in name else value for name, value in row.columns.items()
    }
    return Row(row.prompt, row.response, empty, columns)


def rejected(row: Row) -> Row:
    """A row of which the trainer keeps nothing."""
    return row.having(rollout_corr_keep=torch.zeros_like(row.mask))


def numbers(answer: Answer) -> dict[str, float]:
    """verl's metrics, without what we send beside them."""
    return {name: float(value) for name, value in answer.metrics.items() if "rollout_corr" not in name}


def all_zero(answer: Answer) -> None:
    """No gradient, no loss, and finite metrics."""
    assert all(not gradient.any() for step in answer.gradients for gradient in step.values())
    found = numbers(answer)
    assert all(math.isfinite(value) for value in found.values()), found
    assert found["actor/pg_loss"] == 0.0 and found["actor/loss"] == 0.0 and found["actor/grad_norm"] == 0.0


@pytest.mark.parametrize("denominator", ["all", "kept"])
@pytest.mark.parametrize("mode", MODES)
def test_padding_rows_and_untrainable_rows(
    pools: dict[int, Pool], fresh_model: Callable[[], Any], decided: list[Row], mode: str, denominator: str
) -> None:
    """Two of V1's padding rows and an agent's row without a token: the gradient of the rest, over verl's number of
    rows.
    """
    empty = padding_row().having(rollout_corr_keep=torch.zeros(1, dtype=torch.int64), rollout_is_weights=torch.zeros(1))
    rows = [*decided[:4], empty, untrainable(decided[4]), decided[5], empty]
    objective = objective_of(mode, denominator=denominator)
    steps = reference.train(fresh_model(), rows, objective)
    job = Job(rows, WEIGHTED | {"denominator": denominator}, actor=actor(objective), extra=HORIZON)
    compare(pools, steps, job, [(1, 1, False, "queue", Engine()), (2, 2, False, "queue", Engine())])


@pytest.mark.parametrize("denominator", ["all", "kept"])
@pytest.mark.parametrize("mode", MODES)
def test_everything_rejected(pools: dict[int, Pool], decided: list[Row], mode: str, denominator: str) -> None:
    """Entropy bonus and KL loss on: they leave with the tokens."""
    rows = [rejected(row) for row in decided]
    job = Job(rows, WEIGHTED | {"denominator": denominator}, actor=actor(objective_of(mode)), extra=HORIZON, micro=2)
    answer = pools[2].run(job)
    all_zero(answer)
    tokens = sum(int(row.mask.sum()) for row in rows)
    applied = gather(answer.metrics["actor/" + APPLIED_METRIC])
    assert (applied.tokens, applied.kept, applied.weight_sum) == (tokens, 0, 0)
    assert applied.empty_ranks == [0, 1]


@pytest.mark.parametrize("denominator", ["all", "kept"])
@pytest.mark.parametrize("mode", MODES)
def test_no_trainable_token_at_all(pools: dict[int, Pool], decided: list[Row], mode: str, denominator: str) -> None:
    """A mini-batch of rows without a token: nothing divided by nothing is 0."""
    rows = [untrainable(row) for row in decided]
    job = Job(rows, WEIGHTED | {"denominator": denominator}, actor=actor(objective_of(mode)), extra=HORIZON, micro=4)
    all_zero(pools[1].run(job))


@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce"])
@pytest.mark.parametrize("mode", MODES)
def test_everything_rejected_in_bypass(pools: dict[int, Pool], drawn: list[Row], mode: str, loss: str) -> None:
    """The same decided in the loss, where the metrics of the batch are still counted."""
    rows = [row.having(old_log_probs=row.columns["rollout_log_probs"]) for row in drawn]
    mapping = {"mode": "bypass", "loss": loss, "reject": {"seq_mean_k3": {"upper": 1e-9}}}
    answer = pools[2].run(Job(rows, mapping, actor=actor(objective_of(mode)), extra=HORIZON, micro=2))
    all_zero(answer)
    metrics = finalize(gather(answer.metrics["actor/" + SUMS_METRIC]))
    assert metrics["rollout_corr/rollout_rs_seq_dropped_fraction"] == 1.0
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("denominator", ["all", "kept"])
@pytest.mark.parametrize("mode", MODES)
def test_a_rank_and_a_micro_batch_without_a_kept_token(
    pools: dict[int, Pool], fresh_model: Callable[[], Any], decided: list[Row], mode: str, denominator: str
) -> None:
    """On two ranks the second half of the rows is the second rank; with one row per micro-batch many of them are
    empty.
    """
    rows = [*decided[:4], *(rejected(row) for row in decided[4:])]
    objective = objective_of(mode, denominator=denominator)
    steps = reference.train(fresh_model(), rows, objective)
    job = Job(rows, WEIGHTED | {"denominator": denominator}, actor=actor(objective), extra=HORIZON)
    compare(pools, steps, job, [(1, 1, False, "queue", Engine()), (2, 4, False, "padded", Engine())])


def test_an_untrainable_batch_in_bypass(pools: dict[int, Pool], drawn: list[Row]) -> None:
    """Only padding rows reach one of the ranks: the other trains on what it has."""
    rows = [row.having(old_log_probs=row.columns["rollout_log_probs"]) for row in drawn[:4]]
    padded = [*rows, *[padding_row()] * 4]
    mapping = {"mode": "bypass", "loss": "reinforce"}
    alone = pools[1].run(Job(rows, mapping, micro=4))
    found = pools[2].run(Job(padded, mapping, micro=1))
    assert reference.difference(found.gradients[0], alone.gradients[0]) < 2e-5


def test_one_step_moves_the_parameters(pools: dict[int, Pool], decided: list[Row]) -> None:
    """The counterpart of the zeros above: with something kept there is a gradient."""
    answer = pools[1].run(Job(decided, WEIGHTED, actor=actor(Objective())))
    assert answer.metrics["actor/grad_norm"] > 0.1
