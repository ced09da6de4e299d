"""What verl's trainers can do besides, with the hook on: each run combines several, and all are corrected the same
way.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from e2e import checks, independent, reading, records
from e2e.conftest import Launch
from e2e.launch import Finished
from e2e.records import Step
from e2e.settings import ACTOR, ROLLOUT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(0)]
MODEL = "actor_rollout_ref.model"
K3 = {"rollout_corr.reject.seq_mean_k3.upper": 4e-5}


@dataclass(frozen=True)
class Feature:
    """A run of some features. `epochs`: how often a row is trained on per step. `metrics`: what the tracker has."""

    overrides: dict[str, Any]
    epochs: int = 1
    metrics: tuple[str, ...] = ()
    ranks: int = 1


FEATURES = {
    "lora": Feature(
        {
            "+rollout_corr": "k3_rs_token_is",
            **K3,
            f"{MODEL}.lora_rank": 8,
            f"{MODEL}.lora_alpha": 16,
            f"{MODEL}.target_modules": "all-linear",
            f"{ROLLOUT}.load_format": "safetensors",
        },
    ),
    "filter_groups_and_kl_in_reward": Feature(
        {
            "+rollout_corr": "k3_rs",
            **K3,
            "algorithm.filter_groups.enable": True,
            "algorithm.filter_groups.metric": "acc",
            "algorithm.use_kl_in_reward": True,
            f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
        },
        metrics=("actor/reward_kl_penalty",),
    ),
    "rloo_bypass_two_mini_batches_two_epochs": Feature(
        {
            "+rollout_corr": "bypass_ppo_clip_k3_rs",
            **K3,
            "algorithm.adv_estimator": "rloo",
            f"{ACTOR}.ppo_mini_batch_size": 4,
            f"{ACTOR}.ppo_epochs": 2,
            f"{ACTOR}.use_kl_loss": True,
        },
        epochs=2,
        metrics=("actor/kl_loss",),
        ranks=2,
    ),
    "v0_reinforce_plus_plus_kept": Feature(
        {
            "+rollout_corr": "k3_rs",
            **K3,
            "rollout_corr.denominator": "kept",
            "trainer.use_v1": False,
            "algorithm.adv_estimator": "reinforce_plus_plus",
            f"{ACTOR}.strategy": "fsdp",
            f"{ACTOR}.ppo_mini_batch_size": 4,
            f"{ACTOR}.use_dynamic_bsz": True,
            f"{ACTOR}.ppo_max_token_len_per_gpu": 64,
        },
        ranks=2,
    ),
    "v0_remax": Feature(
        {
            "+rollout_corr": "k3_rs_seq_is",
            **K3,
            "trainer.use_v1": False,
            "algorithm.adv_estimator": "remax",
            "rollout_corr.weights.upper": 1.01,
        },
    ),
}
STEPS = 2


@dataclass(frozen=True)
class Ran:
    """A feature's run."""

    feature: Feature
    run: Finished

    @property
    def logged(self) -> dict[int, dict[str, float]]:
        return checks.green(self.run, STEPS, actors=self.feature.ranks)

    def step(self, number: int) -> Step:
        """The rows that the tracker's metrics are over: each once in decoupled mode, each update's in bypass mode."""
        step = checks.updates(self.run, STEPS)[number]
        return step if step.config["mode"] == "bypass" else step.first_epoch(self.feature.epochs)


@pytest.fixture(scope="session", params=FEATURES)
def ran(request: pytest.FixtureRequest, start: Launch) -> Ran:
    feature = FEATURES[request.param]
    run = start(request.param, STEPS, feature.overrides, ranks=feature.ranks)
    return Ran(feature, run)


def test_ends_well(ran: Ran) -> None:
    for metrics in ran.logged.values():
        assert set(ran.feature.metrics) <= set(metrics)


def test_weights_and_keep_in_the_loss_are_the_oracles(ran: Ran) -> None:
    for number, step in checks.updates(ran.run, STEPS).items():
        assert len(step.rows) == 32 * ran.feature.epochs, number
        checks.applied(step, checks.decided(step))
        checks.partly_rejected(step)


def test_the_tracker_has_the_metrics_of_the_whole_batch(ran: Ran) -> None:
    for number in range(1, STEPS + 1):
        step = ran.step(number)
        checks.tracker(step, checks.decided(step), ran.logged[number])


EVERYTHING: dict[str, Any] = {
    "+rollout_corr": "k3_rs_token_is",
    **K3,
    "rollout_corr.weights.upper": 1.005,
    "algorithm.adv_estimator": "gae",
    "critic.model.path": None,
    f"{ACTOR}.ppo_mini_batch_size": 4,
    f"{ACTOR}.ppo_epochs": 2,
    f"{ACTOR}.use_dynamic_bsz": True,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 64,
    f"{ACTOR}.entropy_coeff": 0.01,
    f"{ACTOR}.use_kl_loss": True,
    "trainer.val_before_train": True,
    "trainer.test_freq": 1,
    "trainer.save_freq": 2,
}
"""GAE with a critic, two mini-batches, two epochs, dynamic micro-batches, entropy and KL loss, validation and a
checkpoint.
"""


@dataclass(frozen=True)
class Resumed:
    """A run of two steps that saves, and one of a third step from there."""

    first: Finished
    second: Finished


@pytest.fixture(scope="module")
def resumed(start: Launch, assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    saved = tmp_path_factory.mktemp("saved")
    everything = EVERYTHING | {
        "critic.model.path": assets / "model",
        "+critic.model.override_config.attn_implementation": "sdpa",
        "critic.model.use_remove_padding": False,
        "critic.ppo_micro_batch_size_per_gpu": 8,
        "trainer.default_local_dir": saved,
    }
    first = start("everything", 2, everything)
    second = start("resumed", 3, everything | {"trainer.resume_mode": "auto", "trainer.save_freq": -1})
    return Resumed(first, second)


def test_everything_at_once_is_corrected(resumed: Resumed) -> None:
    logged, seen = checks.green(resumed.first, 2), checks.updates(resumed.first, 2)
    for number, step in seen.items():
        once = step.first_epoch(2)
        assert len(once.rows) == 32 and len(step.rows) == 64
        checks.applied(step, checks.decided(step))
        checks.partly_rejected(once)
        checks.tracker(once, checks.decided(once), logged[number])
        assert {"critic/vf_loss", "actor/kl_loss", "actor/entropy_loss"} <= set(logged[number])


def test_rejected_tokens_leave_policy_entropy_and_kl(resumed: Resumed, model: Path) -> None:
    """The loss of the first mini-batch, computed again: policy, entropy and KL to the reference, whose weights are
    equal.
    """
    step = checks.updates(resumed.first, 2)[1].first_mini_batch(rows=16)
    again = independent.first_step(model, step, entropy_coeff=0.01)
    assert step.loss == pytest.approx(again.total, abs=1e-5)
    plain = independent.first_step(model, step, entropy_coeff=0.01, corrected=False)
    assert abs(plain.total - again.total) > 1e-3


def test_a_resumed_run_goes_on_corrected(resumed: Resumed) -> None:
    assert resumed.second.returncode == 0, resumed.second.tail()
    logged, seen = reading.steps(resumed.second.log), records.read(resumed.second.records)
    assert 3 in logged and 2 not in logged and list(seen) == [1]
    once = seen[1].first_epoch(2)
    checks.applied(once, checks.decided(once))
    checks.tracker(once, checks.decided(once), logged[3])
