"""The node that carries a preset into the workers, and what a worker refuses."""

from __future__ import annotations

import inspect
import json
import sys
from typing import Any

import pytest
import torch
from verl.single_controller.ray import base as ray_worker_groups
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import FSDPActorConfig, PolicyLossConfig

from hooks import direct
from hooks.rows import Row
from hooks.test_gradients import WEIGHTED
from verl_rollout_corr.configuration.parser import parse, to_mapping
from verl_rollout_corr.configuration.run_check import BYPASS_LOSS_MODE
from verl_rollout_corr.errors import ConfigError, HookError
from verl_rollout_corr.hooks import activity, compat
from verl_rollout_corr.hooks.policy_loss import RolloutCorrPolicyLossConfig
from verl_rollout_corr.hooks.seams import TRAINERS


@pytest.fixture(autouse=True)
def _no_seams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "apply_module", lambda module: None)


def text(**mapping: Any) -> str:
    return json.dumps(to_mapping(parse(mapping)))


@pytest.mark.parametrize("config_json", ["", "k3_rs", "{", "[1]"])
def test_a_text_that_no_preset_wrote(config_json: str) -> None:
    """Missing, a preset's name set by hand, broken JSON, JSON of something else."""
    with pytest.raises(ConfigError):
        RolloutCorrPolicyLossConfig(rollout_corr=config_json)


def test_a_foreign_loss_in_bypass_mode() -> None:
    """The loss of bypass mode is ours: another one would not decide anything."""
    with pytest.raises(ConfigError, match=r"loss_mode=gspo with rollout_corr.mode=bypass"):
        RolloutCorrPolicyLossConfig(loss_mode="gspo", rollout_corr=text(mode="bypass"))


def test_our_loss_in_decoupled_mode() -> None:
    """And ours needs bypass mode."""
    with pytest.raises(ConfigError, match=r"loss_mode=rollout_corr with rollout_corr\.mode=decoupled"):
        RolloutCorrPolicyLossConfig(loss_mode=BYPASS_LOSS_MODE, rollout_corr=text())


def test_our_loss_without_a_preset() -> None:
    """`loss_mode=rollout_corr` by hand, without the node: nothing would be rejected."""
    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(loss_mode=BYPASS_LOSS_MODE),
    )
    zeros = torch.zeros(1, 2)
    with pytest.raises(HookError, match=r"start the run with \+rollout_corr="):
        get_policy_loss_fn(BYPASS_LOSS_MODE)(zeros, zeros, zeros, zeros, "token-mean", config, None)


def test_another_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker with another verl than the trainer's stops when it builds its configuration."""
    monkeypatch.setattr(sys.modules["verl"], "__version__", "0.8.0")
    with pytest.raises(HookError, match=r"found verl 0\.8\.0"):
        RolloutCorrPolicyLossConfig(rollout_corr=text())


def test_a_batch_that_was_not_corrected(monkeypatch: pytest.MonkeyPatch, drawn: list[Row]) -> None:
    """The actor of a run with a preset refuses a batch without the trainer's decision."""
    config = direct.configuration(WEIGHTED, monkeypatch)
    with pytest.raises(HookError, match="has no column rollout_corr_keep, so the trainer's process did not correct it"):
        direct.call(config, drawn)


def test_weights_that_did_not_arrive(monkeypatch: pytest.MonkeyPatch, decided: list[Row]) -> None:
    """Weights were asked for: none in the batch is no reason to train without."""
    config = direct.configuration(WEIGHTED, monkeypatch)
    with pytest.raises(HookError, match="no column rollout_is_weights"):
        direct.call(config, [row.without("rollout_is_weights") for row in decided])


def test_kept_counts_that_nobody_counted(monkeypatch: pytest.MonkeyPatch, decided: list[Row]) -> None:
    """denominator: kept with a worker that is not verl's."""
    config = direct.configuration(WEIGHTED | {"denominator": "kept"}, monkeypatch)
    with pytest.raises(HookError, match=r"set rollout_corr\.denominator=all"):
        direct.call(config, decided)


KNOWN = TRAINERS[0].path


@pytest.mark.parametrize(
    ("variables", "trainer", "refused"),
    [
        ({"RANK": "0", "WG_PREFIX": "x"}, None, True),
        ({"RANK": "0", "WG_PREFIX": "x"}, "my.Trainer", True),
        ({"RANK": "0", "WG_PREFIX": "x"}, KNOWN, False),
        # A TaskRunner, which builds the actor's configuration only to validate it, in a job that torchrun started.
        ({"RANK": "0"}, None, False),
        ({}, None, False),
    ],
)
def test_an_actor_is_built_for_a_hooked_trainer_only(
    variables: dict[str, str], trainer: str | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl's worker groups set RANK and WG_PREFIX."""
    monkeypatch.setattr(activity, "in_ray_actor", lambda: True)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WG_PREFIX", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if refused:
        with pytest.raises(HookError, match="not one of those that the hook knows"):
            RolloutCorrPolicyLossConfig(rollout_corr=text(), rollout_corr_trainer=trainer)
    else:
        RolloutCorrPolicyLossConfig(rollout_corr=text(), rollout_corr_trainer=trainer)


def test_verl_marks_the_processes_of_a_worker_group_so() -> None:
    assert '"WG_PREFIX"' in inspect.getsource(ray_worker_groups) and '"RANK"' in inspect.getsource(ray_worker_groups)
