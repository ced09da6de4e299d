"""A worker in which a function is another one than its file says, or that is told something else than the trainer said,
stops before the optimiser steps. In verl's own training worker.
"""

from __future__ import annotations

from typing import Any

import pytest

from hooks import faults_in_code as faults
from hooks.actor import Job
from hooks.pool import Pool
from hooks.rows import Row
from hooks.test_faults import BYPASS, CHANGED, HANDED, in_bypass, refused
from hooks.test_gradients import WEIGHTED

NOT_AS_WRITTEN = r"in this actor verl_rollout_corr\.{} is not what its file says"


def replaced(where: str) -> str:
    return NOT_AS_WRITTEN.format(where.replace(".", r"\."))


OTHER_TABLE = r"other constants or tables in verl_rollout_corr\.maths\.statistics|STATISTICS\[[^\]]+\] is not what its"

EITHER: list[tuple[Any, str]] = [
    (faults.method_is_the_users, replaced("hooks.ledger.Call.watch")),
    (faults.configuration_is_not_found, replaced("hooks.share.config_of_actor")),
    (faults.configuration_is_anothers, r"this actor has rollout_corr\.invalid=reject, and the trainer error"),
    (faults.divisor_of_kept_tokens, "verl divides by the [0-9]+ tokens of the column loss_mask, and the mini-batch of"),
    (faults.another_temperature, r"is to train with temperature=0\.7, and the trainer's configuration says 1\.0"),
    (faults.another_batch_size, "is to train with global_batch_size=4, and the trainer's configuration says 8"),
    (faults.more_epochs, "is to train with epochs=2, and the trainer's configuration says 1"),
    (faults.mask_of_the_kept, CHANGED),
    (faults.mask_of_everything, CHANGED),
    (faults.old_log_probs_in_float16, CHANGED),
    (faults.advantages_of_the_kept, CHANGED),
]
DECOUPLED: list[tuple[Any, str]] = [
    *EITHER,
    (faults.one_flag_inverted, CHANGED),
    (faults.one_weight_changed, CHANGED),
    (faults.policy_loss_twice, "the policy loss ran twice for one micro-batch"),
    (faults.policy_loss_with_squared_weights, HANDED),
    (faults.policy_loss_around_the_original, "this policy loss ignores rollout_is_weights"),
]
IN_BYPASS: list[tuple[Any, str]] = [
    *EITHER,
    (faults.decide_is_the_users, replaced("hooks.worker.decide")),
    (faults.decide_is_the_users_where_it_is_defined, replaced("maths.correction.decide")),
    (faults.decide_of_another_signature, replaced("hooks.worker.decide")),
    (faults.decide_has_other_code, replaced("maths.log_ratio.ratio")),
    (faults.weights_are_the_users, replaced("maths.correction.weigh")),
    (faults.statistic_is_the_users, OTHER_TABLE),
    (faults.statistics_change_places, OTHER_TABLE),
    (faults.policy_loss_twice, "the loss of bypass mode, was registered anew as"),
    (faults.policy_loss_with_squared_weights, "the loss of bypass mode, was registered anew as"),
    (faults.policy_loss_around_the_original, "the loss of bypass mode, was registered anew as"),
]


@pytest.mark.parametrize(("fault", "message"), DECOUPLED, ids=lambda value: getattr(value, "__name__", ""))
def test_decoupled(pools: dict[int, Pool], decided: list[Row], fault: Any, message: str) -> None:
    refused(pools[1], Job(decided, WEIGHTED, micro=2, fault=fault.__name__), message)


@pytest.mark.parametrize(("fault", "message"), IN_BYPASS, ids=lambda value: getattr(value, "__name__", ""))
def test_bypass(pools: dict[int, Pool], drawn: list[Row], fault: Any, message: str) -> None:
    refused(pools[1], Job(in_bypass(drawn), BYPASS, micro=2, fault=fault.__name__), message)


def test_the_order_of_micro_batches_does_not_matter(pools: dict[int, Pool], decided: list[Row]) -> None:
    pools[1].run(Job(decided, WEIGHTED, micro=2, fault=faults.micro_batches_in_another_order.__name__))
