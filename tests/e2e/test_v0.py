"""RayPPOTrainer (V0) on two ranks of FSDP1, BF16 rollouts: both modes, and estimators and denominators update by
update. In the end the engine gives NaN.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from e2e import checks, independent, reading
from e2e.conftest import StartPlan
from e2e.plans import Planned, Update
from e2e.settings import ACTOR

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(0)]

K3 = {"reject.seq_mean_k3.upper": 4e-5}
"""About the median of what BF16 rollouts give."""
STILL = {f"{ACTOR}.optim.lr": 1e-8}
"""Next to no learning, so that the next update too is one of the first weights."""
KEPT = {
    "algorithm.adv_estimator": "reinforce_plus_plus",
    f"{ACTOR}.ppo_mini_batch_size": 4,
    f"{ACTOR}.use_dynamic_bsz": True,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 64,
}
REMAX = {"algorithm.adv_estimator": "remax"}
# Most weights are cut, so that the correction changes the loss by more than BF16's noise about 1 does.
CUT = {"weights.upper": 0.995}

PLAN = (
    Update("token_is", ("token_is",), CUT, STILL),
    Update("bypass", ("bypass_reinforce", "k3_rs"), K3 | {"weights.upper": 1.002}, STILL),
    Update("kept", ("k3_rs",), K3 | {"denominator": "kept"}, KEPT | STILL),
    Update("remax", ("k3_rs_seq_is",), K3 | {"weights.upper": 1.0}, REMAX),
    Update("token_is_again", ("token_is",), CUT),
    Update("bypass_again", ("bypass_reinforce", "k3_rs"), K3 | {"weights.upper": 1.002}),
    Update("kept_again", ("k3_rs",), K3 | {"denominator": "kept"}, KEPT),
    Update("remax_again", ("k3_rs_seq_is",), K3 | {"weights.upper": 1.0}, REMAX),
    Update("nan", ("k3_rs",), engine="nan"),
)
NAMES = tuple(update.name for update in PLAN if update.name != "nan")
COMMON: dict[str, Any] = {"trainer.use_v1": False, f"{ACTOR}.strategy": "fsdp", f"{ACTOR}.optim.lr": 5e-5}


@pytest.fixture(scope="module")
def ran(start_plan: StartPlan) -> Planned:
    """The whole plan."""
    return start_plan("v0", PLAN, COMMON, ranks=2, stops=True)


def test_every_process_says_what_is_active(ran: Planned) -> None:
    assert ran.lines
    words = ("preset=token_is", "weights=token[-,0.995]truncate", "criteria=none")
    checks.said(ran.run, actors=2, words=words)


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_keep_in_the_loss_are_the_oracles(ran: Planned, name: str) -> None:
    step = ran.seen(name)
    assert len(step.rows) == 32 and step.ranks == [0, 1]
    checks.applied(step, checks.decided(step))
    if step.config["reject"]:
        checks.partly_rejected(step)
    upper = step.config["weights"]["upper"]
    if upper is not None:
        weights = [w for row in step.rows for w in row.columns["rollout_is_weights"][row.keep].tolist()]
        assert max(weights) == pytest.approx(upper, rel=1e-6)
        # By how much the engine is off is the samples' own, and of 32 rows few may be kept: the bound is about the
        # median of what is kept.
        assert min(weights) < max(weights) - 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_the_tracker_has_the_metrics_of_the_whole_batch(ran: Planned, name: str) -> None:
    step = ran.seen(name)
    checks.tracker(step, checks.decided(step), ran.logged(name))


@pytest.mark.parametrize("name", ["token_is", "bypass"])
def test_the_update_computed_again(ran: Planned, model: Path, name: str) -> None:
    checks.first_step(ran.run, model, ran.seen(name), ran.logged(name))


def test_the_denominator_is_what_is_kept_over_both_ranks(ran: Planned, model: Path) -> None:
    """The loss of the first of two mini-batches, by the kept tokens of both ranks; by all of them it is another."""
    step = ran.seen("kept").first_mini_batch(rows=16)
    kept = sum(int(row.keep.sum()) for row in step.rows)
    tokens = sum(int(row.mask.sum()) for row in step.rows)
    assert 0 < kept < tokens
    again = independent.first_step(model, step, divisor=kept)
    error = abs(step.loss - again.total)
    assert error < 4e-6
    assert abs(step.loss - independent.first_step(model, step, divisor=tokens).total) > max(20 * error, 1e-6)


@pytest.mark.chaos
def test_nan_of_the_engine_stops_the_run_and_names_the_row(ran: Planned) -> None:
    """Before anything of that step reached the loss or was logged."""
    assert list(ran.lines) == list(ran.records) == list(range(1, len(PLAN)))
    text = reading.plain(ran.run.log)
    assert re.search(r"InputError.*rollout_log_probs.*NaN", text), ran.run.tail()
    assert re.search(r"row \d+", text) and "position 0" in text, ran.run.tail()
