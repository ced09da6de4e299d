"""Trainers and modes: what reached the actor's loss, what the tracker says, and one update computed again without
verl.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from e2e import checks
from e2e.conftest import Launch
from e2e.launch import Finished
from e2e.records import Step
from e2e.settings import ACTOR, ROLLOUT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(0)]


@dataclass(frozen=True)
class Variant:
    """A run, and what its start-up lines say. The bounds are about the median of what BF16 rollouts give."""

    overrides: dict[str, Any]
    words: tuple[str, ...]
    steps: int = 2
    ranks: int = 1
    rejects: bool = True
    unlike: dict[str, float] = field(default_factory=dict)


K3 = {"rollout_corr.reject.seq_mean_k3.upper": 4e-5}
VARIANTS = {
    "k3_rs": Variant(
        {"+rollout_corr": "k3_rs", **K3},
        ("preset=k3_rs", "mode=decoupled", "weights=none", "criteria=seq_mean_k3[-,4e-05]"),
    ),
    "bypass_reinforce": Variant(
        {"+rollout_corr": "[bypass_reinforce,k3_rs]", **K3, "rollout_corr.weights.upper": 1.01},
        ("preset=bypass_reinforce+k3_rs", "mode=bypass", "loss=reinforce", "weights=seq_sum[-,1.01]truncate"),
    ),
    "v0_token_is": Variant(
        {
            "+rollout_corr": "token_is",
            # Most weights are cut, so that the correction changes the loss by more than BF16's noise about 1 does.
            "rollout_corr.weights.upper": 0.995,
            "trainer.use_v1": False,
            f"{ACTOR}.strategy": "fsdp",
        },
        ("preset=token_is", "weights=token[-,0.995]truncate", "criteria=none"),
        rejects=False,
    ),
    "two_ranks": Variant(
        {
            "+rollout_corr": "[k3_rs,token_is]",
            **K3,
            "rollout_corr.weights.upper": 1.005,
            f"{ROLLOUT}.temperature": 0.8,
        },
        ("preset=k3_rs+token_is", "weights=token[-,1.005]truncate", "criteria=seq_mean_k3[-,4e-05]"),
        ranks=2,
    ),
}


@dataclass(frozen=True)
class Ran:
    """A variant and its run."""

    variant: Variant
    run: Finished

    @property
    def logged(self) -> dict[int, dict[str, float]]:
        return checks.green(self.run, self.variant.steps, actors=self.variant.ranks, words=self.variant.words)

    @property
    def seen(self) -> dict[int, Step]:
        return checks.updates(self.run, self.variant.steps)


@pytest.fixture(scope="session", params=VARIANTS)
def ran(request: pytest.FixtureRequest, start: Launch) -> Ran:
    variant = VARIANTS[request.param]
    return Ran(variant, start(request.param, variant.steps, variant.overrides, ranks=variant.ranks))


def test_ends_well_and_every_process_says_what_is_active(ran: Ran) -> None:
    assert ran.logged


def test_every_row_reached_the_loss_once(ran: Ran) -> None:
    for step in ran.seen.values():
        assert len(step.rows) == 32
        assert {row.rank for row in step.rows} == set(range(ran.variant.ranks))


def test_weights_and_keep_in_the_loss_are_the_oracles(ran: Ran) -> None:
    for step in ran.seen.values():
        checks.applied(step, checks.decided(step))


def test_something_was_corrected_and_something_left_alone(ran: Ran) -> None:
    for step in ran.seen.values():
        if ran.variant.rejects:
            checks.partly_rejected(step)
        if step.config["weights"]["level"] is not None:
            weights = [w for row in step.rows for w in row.columns["rollout_is_weights"][row.mask].tolist()]
            upper = step.config["weights"]["upper"]
            assert max(weights) == pytest.approx(upper, rel=1e-6)
            assert min(weights) < 0.99


def test_the_tracker_has_the_metrics_of_the_whole_batch(ran: Ran) -> None:
    for number, step in ran.seen.items():
        checks.tracker(step, checks.decided(step), ran.logged[number])


def test_the_first_update_computed_again(ran: Ran, model: Path) -> None:
    checks.first_step(ran.run, model, ran.seen[1], ran.logged[1])
