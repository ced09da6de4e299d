"""Cases 57, 59, 68 and their kin: a worker that does not do what the trainer decided stops, before the optimiser steps.

In verl's own training worker, on one rank and on two.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hooks import faults
from hooks.actor import Job
from hooks.pool import Pool
from hooks.rows import Row
from hooks.test_gradients import WEIGHTED

BYPASS = {
    "mode": "bypass",
    "loss": "reinforce",
    "weights": {"level": "token", "upper": 2.0},
    "reject": {"token_k1": {"lower": 0.9, "upper": 1.2}, "lag": {"upper": 1}},
}
CHANGED = "row [0-9]+ of the trainer's batch reached the actor's loss with another decision"
HANDED = "was handed other log-probs, advantages, weights or another mask"
GRADIENT = "tokens that the correction rejected have a gradient"
PART = r"ran for [0-9]+ of the [0-9]+ response tokens of a mini-batch"
REPLACED = "something has put verl's own function back before the worker was built"
LOST = "the rows that reached the actors of all ranks are not those of the update that the trainer decided on"
OTHERS = "its loss is .*without the correction in front of it and without its configuration"
UNCHECKED = "the actor's loss runs outside of the train_batch that checks it before the optimiser steps"
OUTSIDE = "is to be trained on outside of the train_mini_batch that compares what arrived with what was sent"
OLD = r"update (\d+) of the trainer reached this actor after update \1: what arrived is not the batch"
EITHER: list[tuple[Any, str]] = [
    (faults.old_log_probs_swapped, CHANGED),
    (faults.advantages_of_zero, CHANGED),
    (faults.advantages_of_other_rows, CHANGED),
    (faults.advantages_in_bfloat16, CHANGED),
    (faults.tokens_in_another_order, CHANGED),
    (faults.rows_in_another_order, CHANGED),
    (faults.columns_of_the_update_before, CHANGED),
    (faults.row_twice, LOST),
    (faults.update_of_before, OLD),
    (faults.another_configuration, r"this actor has rollout_corr\.denominator=all, and the trainer kept"),
    (faults.without_digest, "does not say rollout_corr_digest, so the trainer's process did not correct it"),
    (faults.without_row, "does not say rollout_corr_row, so the trainer's process did not correct it"),
    (faults.without_update, "does not say rollout_corr_update, so the trainer's process did not correct it"),
    (faults.micro_batch_dropped, PART),
    (faults.micro_batch_twice, PART),
    (faults.loss_ignores_the_rejection, r"hooks\.worker\.neutralise is not what its file says"),
    (faults.loss_adds_what_was_rejected, GRADIENT),
    (faults.half_of_the_micro_batches, PART),
    (faults.loss_is_verls_later, REPLACED),
    (faults.loss_is_the_users_later, OTHERS),
    (faults.loss_without_its_mini_batch, UNCHECKED),
    (faults.mini_batches_are_verls, OUTSIDE),
    (faults.verls_loss_on_the_last_rank, REPLACED),
]
"""In both modes."""

DECOUPLED: list[tuple[Any, str]] = [
    *EITHER,
    (faults.weights_of_one, CHANGED),
    (faults.weights_swapped, CHANGED),
    (faults.weights_scaled, CHANGED),
    (faults.weights_in_bfloat16, CHANGED),
    (faults.weights_of_other_rows, CHANGED),
    (faults.flags_swapped, CHANGED),
    (faults.flags_inverted, CHANGED),
    (faults.flags_of_other_rows, CHANGED),
    (faults.everything_kept, CHANGED),
    (faults.without_keep, "no column rollout_corr_keep, so the trainer's process did not correct it"),
    (faults.without_weights, "no column rollout_is_weights, so the trainer's process gave it no weights"),
    (faults.policy_loss_registered_later, "this policy loss ignores rollout_is_weights"),
    (faults.policy_loss_gets_other_weights, HANDED),
    (faults.verls_loss_and_mini_batch_on_the_last_rank, "the policy loss vanilla was called without the correction"),
]
IN_BYPASS: list[tuple[Any, str]] = [
    *EITHER,
    (faults.staleness_of_zero, CHANGED),
    (faults.without_staleness, "no column rollout_corr_staleness, so the trainer's process did not say how old"),
    (faults.policy_loss_gets_other_weights, HANDED),
    (faults.policy_loss_registered_later, "the loss of bypass mode, was registered anew as hooks.faults."),
    (faults.verls_loss_and_mini_batch_on_the_last_rank, "the policy loss rollout_corr was called without"),
]


def in_bypass(rows: list[Row]) -> list[Row]:
    return [
        row.having(old_log_probs=row.columns["rollout_log_probs"], rollout_corr_staleness=torch.tensor(number % 3))
        for number, row in enumerate(rows)
    ]


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


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (faults.verls_loss_on_the_last_rank, REPLACED),
        (faults.weights_scaled_on_the_last_rank, CHANGED),
        (faults.mini_batches_are_verls_on_the_last_rank, OUTSIDE),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_case_57_one_rank_of_two(
    model_folder: Path, drawn: list[Row], decided: list[Row], fault: Any, message: str
) -> None:
    """The rank with verl's own functions, or with other weights, refuses; the other one waits for it before its
    optimiser's step, and in a run is ended with the trainer.
    """
    pool = Pool(2, model_folder)
    rows, mapping = (in_bypass(drawn), BYPASS) if message == REPLACED else (decided, WEIGHTED)
    try:
        pool.send(Job(rows, mapping, micro=1, fault=fault.__name__))
        with pytest.raises(RuntimeError, match=message):
            pool.answer_of(1)
        assert not pool.has_answered(0)
    finally:
        pool.kill()


@pytest.mark.parametrize("mapping", [WEIGHTED, BYPASS], ids=["decoupled", "bypass"])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (faults.mini_batch_twice, "comes more than 1 times in an update of 1 epochs, in the place of another one"),
        (faults.mini_batch_dropped, "4 rows of the trainer's batch, the first of them row 4, reached this actor and"),
        (faults.engine_that_steps_by_itself, "without a call of its own optimizer_step, before which the correction"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_seen_after_the_first_step(
    pools: dict[int, Pool], drawn: list[Row], decided: list[Row], fault: Any, message: str, mapping: dict[str, Any]
) -> None:
    """Of two mini-batches the first is as it should be; and nobody is asked before a step that the engine hides."""
    rows = decided if mapping is WEIGHTED else in_bypass(drawn)
    refused(pools[1], Job(rows, mapping, micro=2, mini_batches=2, fault=fault.__name__), message, steps=1)


def refused(pool: Pool, job: Job, message: str, *, steps: int = 0) -> None:
    """The job fails with the message and without a step of the optimiser, or after so many."""
    with pytest.raises(RuntimeError) as error:
        pool.run(job)
    assert re.search(message, str(error.value)), str(error.value)[-2000:]
    assert f"steps of the optimiser: {steps}" in str(error.value)
