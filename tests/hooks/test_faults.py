"""Cases 57, 59, 68 and their kin: a worker that does not do what the trainer decided stops, before the optimiser steps.

In verl's own training worker, on one rank and on two.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hooks import faults
from hooks.actor import Job
from hooks.pool import Pool
from hooks.rows import Row
from hooks.test_gradients import WEIGHTED

BYPASS = {"mode": "bypass", "reject": {"token_k1": {"lower": 0.9, "upper": 1.2}}}
CHANGED = "row [0-9]+ of the trainer's batch reached the actor's loss with another decision"
HANDED = "was handed other log-probs, advantages, weights or another mask"
GRADIENT = "tokens that the correction rejected have a gradient"
PART = r"ran for [0-9]+ of the [0-9]+ response tokens of a mini-batch"
REPLACED = "something has put verl's own function back before the worker was built"

DECOUPLED: list[tuple[Any, str]] = [
    (faults.weights_of_one, CHANGED),
    (faults.weights_swapped, CHANGED),
    (faults.flags_swapped, CHANGED),
    (faults.everything_kept, CHANGED),
    (faults.weights_in_bfloat16, CHANGED),
    (faults.weights_of_other_rows, CHANGED),
    (faults.flags_inverted, CHANGED),
    (faults.advantages_of_zero, CHANGED),
    (faults.advantages_of_other_rows, CHANGED),
    (faults.old_log_probs_swapped, CHANGED),
    (faults.micro_batch_dropped, PART),
    (faults.micro_batch_twice, PART),
    (faults.policy_loss_registered_later, "this policy loss ignores rollout_is_weights"),
    (faults.loss_ignores_the_rejection, GRADIENT),
    (faults.loss_adds_what_was_rejected, GRADIENT),
    (faults.policy_loss_gets_other_weights, HANDED),
    (faults.half_of_the_micro_batches, PART),
    (faults.verls_loss_on_the_last_rank, REPLACED),
    (faults.verls_loss_and_mini_batch_on_the_last_rank, "the policy loss vanilla was called without the correction"),
]
IN_BYPASS: list[tuple[Any, str]] = [
    (faults.old_log_probs_swapped, CHANGED),
    (faults.advantages_of_zero, CHANGED),
    (faults.advantages_of_other_rows, CHANGED),
    (faults.micro_batch_dropped, PART),
    (faults.micro_batch_twice, PART),
    (faults.policy_loss_registered_later, "the loss of bypass mode, was registered anew as hooks.faults."),
    (faults.loss_ignores_the_rejection, GRADIENT),
    (faults.loss_adds_what_was_rejected, GRADIENT),
    (faults.half_of_the_micro_batches, PART),
    (faults.verls_loss_on_the_last_rank, REPLACED),
    (faults.verls_loss_and_mini_batch_on_the_last_rank, "the policy loss rollout_corr was called without"),
]


def in_bypass(rows: list[Row]) -> list[Row]:
    return [row.having(old_log_probs=row.columns["rollout_log_probs"]) for row in rows]


@pytest.mark.parametrize(("fault", "message"), DECOUPLED, ids=lambda value: getattr(value, "__name__", ""))
def test_decoupled(pools: dict[int, Pool], decided: list[Row], fault: Any, message: str) -> None:
    refused(pools[1], Job(decided, WEIGHTED, micro=2, fault=fault.__name__), message)


@pytest.mark.parametrize(("fault", "message"), IN_BYPASS, ids=lambda value: getattr(value, "__name__", ""))
def test_bypass(pools: dict[int, Pool], drawn: list[Row], fault: Any, message: str) -> None:
    refused(pools[1], Job(in_bypass(drawn), BYPASS, micro=2, fault=fault.__name__), message)


@pytest.mark.parametrize("fault", [faults.weights_swapped, faults.everything_kept, faults.loss_ignores_the_rejection])
def test_two_ranks(pools: dict[int, Pool], decided: list[Row], fault: Any) -> None:
    """Both ranks find their own share of it."""
    message = dict(DECOUPLED)[fault]
    refused(pools[2], Job(decided, WEIGHTED, micro=1, fault=fault.__name__), message)


@pytest.mark.parametrize(("mapping", "fault"), [(BYPASS, faults.verls_loss_on_the_last_rank)], ids=["bypass"])
def test_case_57_one_rank_of_two(model_folder: Path, drawn: list[Row], mapping: dict[str, Any], fault: Any) -> None:
    """The rank with verl's own loss refuses; the other one waits for it before its optimiser's step, and in a run is
    ended with the trainer.
    """
    pool = Pool(2, model_folder)
    try:
        pool.send(Job(in_bypass(drawn), mapping, micro=1, fault=fault.__name__))
        with pytest.raises(RuntimeError, match=REPLACED):
            pool.answer_of(1)
        assert not pool.has_answered(0)
    finally:
        pool.kill()


def refused(pool: Pool, job: Job, message: str) -> None:
    """The job fails with the message and without a step of the optimiser."""
    with pytest.raises(RuntimeError) as error:
        pool.run(job)
    assert re.search(message, str(error.value)), str(error.value)[-2000:]
    assert "steps of the optimiser: 0" in str(error.value)
