"""PPOTrainerSync on two ranks, BF16 rollouts, with a critic and a reference policy, and what verl's trainers can do
besides, update by update: it saves, ends in an actor that gives NaN, and is resumed, until an actor is killed.
"""

from __future__ import annotations

import math
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from e2e import checks, independent, reading
from e2e.conftest import StartPlan
from e2e.plans import Planned, Update
from e2e.settings import ACTOR, ROLLOUT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(0)]

K3 = {"reject.seq_mean_k3.upper": 6.5e-5}
"""About the median of what BF16 rollouts give: of 32 rows, which are other ones in each run, some are kept and some are
not.
"""
AFTER_A_STEP = {"reject.seq_mean_k3.upper": 2e-4}
"""About the median in bypass mode, where the later of four updates have rows of the weights before."""
CUT = {"weights.upper": 1.001}
"""Nearly half of all weights are cut, so that some are, whatever is sampled and kept."""
TWICE = {f"{ACTOR}.ppo_mini_batch_size": 4, f"{ACTOR}.ppo_epochs": 2}
"""Four updates of the weights with the rows of a step, each row in two of them."""
PLAIN = {f"{ACTOR}.use_kl_loss": False, "algorithm.use_kl_in_reward": False}
EVERYTHING = TWICE | {
    "algorithm.adv_estimator": "gae",
    f"{ACTOR}.use_dynamic_bsz": True,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 64,
    f"{ACTOR}.entropy_coeff": 0.01,
    f"{ACTOR}.use_kl_loss": True,
    "algorithm.use_kl_in_reward": False,
}
"""GAE with a critic, two mini-batches, two epochs, dynamic micro-batches, entropy and KL loss."""
IN_REWARD = {
    "algorithm.use_kl_in_reward": True,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
}
RLOO = TWICE | {"algorithm.adv_estimator": "rloo", f"{ACTOR}.use_kl_loss": True, "algorithm.use_kl_in_reward": False}

BOTH = ("k3_rs", "token_is")
PLAN = (
    # Next to no learning, so that the next update too is one of the first weights.
    Update("two_ranks", BOTH, K3 | CUT, PLAIN | {f"{ACTOR}.optim.lr": 1e-8}),
    Update("everything", ("k3_rs_token_is",), K3 | CUT, EVERYTHING),
    Update("everything_again", ("k3_rs_token_is",), K3 | CUT, EVERYTHING),
    Update("kl_in_reward", ("k3_rs",), K3, IN_REWARD),
    Update("kl_in_reward_again", ("k3_rs",), K3, IN_REWARD),
    Update("rloo", ("bypass_ppo_clip_k3_rs",), AFTER_A_STEP, RLOO),
    Update("rloo_again", ("bypass_ppo_clip_k3_rs",), AFTER_A_STEP, RLOO),
    Update("nan_of_the_actor", ("bypass_ppo_clip",), {}, PLAIN),
)
SAVED = 7
METRICS = {
    "everything": {"critic/vf_loss", "actor/kl_loss", "actor/entropy_loss"},
    "everything_again": {"critic/vf_loss", "actor/kl_loss", "actor/entropy_loss"},
    "kl_in_reward": {"actor/reward_kl_penalty"},
    "kl_in_reward_again": {"actor/reward_kl_penalty"},
    "rloo": {"actor/kl_loss"},
    "rloo_again": {"actor/kl_loss"},
}
RESUMED = (Update("resumed", ("k3_rs_token_is",), K3 | CUT, EVERYTHING),)


def common(assets: Path, saved: Path) -> dict[str, Any]:
    """What holds for the whole run: what verl reads once, and the first values of what the plan changes."""
    return {
        f"{ROLLOUT}.temperature": 0.8,
        f"{ACTOR}.optim.lr": 5e-5,
        f"{ACTOR}.use_kl_loss": True,
        "algorithm.use_kl_in_reward": True,
        "algorithm.filter_groups.enable": True,
        "algorithm.filter_groups.metric": "acc",
        # A critic is made for this estimator only.
        "algorithm.adv_estimator": "gae",
        "critic.model.path": assets / "model",
        "+critic.model.override_config.attn_implementation": "sdpa",
        "critic.model.use_remove_padding": False,
        "critic.ppo_micro_batch_size_per_gpu": 8,
        "trainer.val_before_train": True,
        "trainer.test_freq": 3,
        "trainer.default_local_dir": saved,
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the checkpoint is."""
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def ran(start_plan: StartPlan, assets: Path, saved: Path) -> Planned:
    """The whole plan."""
    overrides = common(assets, saved) | {"algorithm.adv_estimator": "gae", "trainer.save_freq": SAVED}
    bad = {"E2E_BAD_UPDATE": str(len(PLAN))}
    plan = tuple(_grpo(update) for update in PLAN)
    return start_plan("two_ranks", plan, overrides, ranks=2, stops=True, env=bad, modules=["e2e_bad_actor"])


def _grpo(update: Update) -> Update:
    """verl's default estimator where the update names none; the run starts with GAE."""
    return Update(update.name, update.presets, update.node, {"algorithm.adv_estimator": "grpo"} | update.run)


def kill_an_actor(_: str, log: str) -> None:
    """The process of the first actor worker."""
    found = re.search(r"active role=actor0 pid=(\d+)", reading.plain(log))
    assert found is not None
    os.kill(int(found.group(1)), signal.SIGKILL)


@pytest.fixture(scope="module")
def resumed(ran: Planned, start_plan: StartPlan, assets: Path, saved: Path) -> Planned:
    """A run that goes on from the checkpoint, and loses an actor."""
    assert ran.lines
    overrides = common(assets, saved) | {"trainer.resume_mode": "auto", "trainer.val_before_train": False}
    return start_plan("resumed", RESUMED, overrides, ranks=2, first=SAVED + 1, killed=kill_an_actor)


NAMES = tuple(update.name for update in PLAN if update.name != "nan_of_the_actor")


def test_every_process_says_what_is_active(ran: Planned) -> None:
    assert ran.lines
    words = ("preset=k3_rs+token_is", "weights=token[-,1.001]truncate", "criteria=seq_mean_k3[-,6.5e-05]")
    checks.said(ran.run, actors=2, words=words)


def test_every_row_reached_the_loss_once(ran: Planned) -> None:
    step = ran.seen("two_ranks")
    assert len(step.rows) == 32 and step.ranks == [0, 1]


@pytest.mark.parametrize("name", NAMES)
def test_verls_features_are_on(ran: Planned, name: str) -> None:
    assert METRICS.get(name, set()) <= set(ran.logged(name))
    assert len(ran.seen(name).rows) == 32 * epochs(name)


def epochs(name: str) -> int:
    return 2 if name.startswith(("everything", "rloo")) else 1


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_keep_in_the_loss_are_the_oracles(ran: Planned, name: str) -> None:
    step = ran.seen(name)
    checks.applied(step, checks.decided(step))
    checks.partly_rejected(step)
    if step.config["weights"]["level"] is not None:
        weights = [w for row in step.rows for w in row.columns["rollout_is_weights"][row.keep].tolist()]
        assert max(weights) == pytest.approx(1.001, rel=1e-6)
        assert min(weights) < 1.0


@pytest.mark.parametrize("name", NAMES)
def test_the_tracker_has_the_metrics_of_the_whole_batch(ran: Planned, name: str) -> None:
    """Over each row once in decoupled mode, over each update's rows in bypass mode."""
    step = ran.seen(name)
    once = step if step.config["mode"] == "bypass" else step.first_epoch(epochs(name))
    checks.tracker(once, checks.decided(once), ran.logged(name))


def test_the_first_update_computed_again(ran: Planned, model: Path) -> None:
    checks.first_step(ran.run, model, ran.seen("two_ranks"), ran.logged("two_ranks"))


def test_rejected_tokens_leave_policy_entropy_and_kl(ran: Planned, model: Path) -> None:
    """The loss of the first mini-batch, computed again: policy, entropy and KL to the reference, whose weights are
    equal.
    """
    step = ran.seen("everything").first_mini_batch(rows=16)
    again = independent.first_step(model, step, entropy_coeff=0.01)
    assert step.loss == pytest.approx(again.total, abs=1e-5)
    plain = independent.first_step(model, step, entropy_coeff=0.01, corrected=False)
    assert abs(plain.total - again.total) > 1e-3


@pytest.mark.chaos
def test_nan_of_the_actor_stops_a_bypass_run_and_names_the_row(ran: Planned) -> None:
    """Only the loss sees it: it rejects the row, and the optimiser does not step."""
    assert list(ran.lines) == list(range(1, len(PLAN)))
    said = r"InputError.*log-prob is nan at row 5, position 2, and 1 rows of.*The run stops before the optimiser steps"
    assert re.search(said, reading.plain(ran.run.log)) is not None, ran.run.tail()
    step = ran.seen("nan_of_the_actor")
    assert max(ran.records) == len(PLAN)
    invalid = [row for row in step.rows if row.log_prob[row.mask].isnan().any()]
    assert len(invalid) == 1 and not invalid[0].keep.any()
    for micro in step.micro_batches:  # NaN where verl would step although nobody has looked: it skips such a step
        finite = not any(row.log_prob[row.mask].isnan().any() for row in micro.rows())
        assert math.isfinite(micro.record["loss"]) is finite


def test_a_resumed_run_goes_on_corrected(resumed: Planned) -> None:
    assert min(reading.steps(resumed.run.log)) == SAVED + 1
    step, logged = resumed.seen("resumed"), resumed.logged("resumed")
    checks.applied(step, checks.decided(step))
    once = step.first_epoch(2)
    checks.partly_rejected(once)
    checks.tracker(once, checks.decided(once), logged)


@pytest.mark.chaos
def test_a_killed_actor_ends_the_run_with_the_cause(resumed: Planned) -> None:
    """verl does not start it anew: a run that went on would train on what is left."""
    checks.ended_by_a_death(resumed, "ActorDiedError")
