"""A preset runs with the trainers that the hook was written for, and with no other."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.experimental.fully_async_policy.fully_async_trainer import FullyAsyncTrainer
from verl.experimental.one_step_off_policy.ray_trainer import OneStepOffRayTrainer
from verl.experimental.separation.ray_trainer import SeparateRayPPOTrainer
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, PPOTrainer

from verl_rollout_corr.configuration.parser import to_mapping
from verl_rollout_corr.configuration.presets import load_preset
from verl_rollout_corr.errors import HookError
from verl_rollout_corr.hooks import activity, compat, driver, driver_v0, driver_v1
from verl_rollout_corr.hooks.policy_loss import RolloutCorrPolicyLossConfig
from verl_rollout_corr.hooks.seams import TRAINERS
from verl_rollout_corr.patching import function_of

KNOWN = [
    PPOTrainerSync,
    PPOTrainerColocateAsync,
    PPOTrainerSeparateAsync,
    RayPPOTrainer,
    OneStepOffRayTrainer,
    FullyAsyncTrainer.__ray_metadata__.modified_class,
]


def configuration(preset: str | None = "k3_rs") -> Any:
    config_json = json.dumps(to_mapping(load_preset(preset))) if preset else None
    loss_mode = "rollout_corr" if preset is not None and preset.startswith("bypass") else "vanilla"
    config = OmegaConf.create(
        {
            "algorithm": {"rollout_correction": {"rollout_corr": config_json}},
            "actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": loss_mode, "rollout_corr": config_json}}},
        }
    )
    OmegaConf.set_struct(config, True)  # as Hydra composes it
    return config


@pytest.mark.parametrize("trainer_class", KNOWN, ids=lambda trainer_class: trainer_class.__name__)
def test_verls_trainers_are_known(trainer_class: type) -> None:
    known = compat.known_trainer(trainer_class)
    assert known.path.endswith(trainer_class.__name__)
    restores = trainer_class.__name__ in ("PPOTrainerSeparateAsync", "FullyAsyncTrainer")
    assert known.restores_old_policy is restores
    assert restores is any(
        "restore_model_from_cpu" in function_of(method).names for method in old_policy(trainer_class)
    )
    assert known.joins_updates is (trainer_class.__name__ == "FullyAsyncTrainer")


def old_policy(trainer_class: type) -> list[Any]:
    """The methods that compute pi_old, as the class has them."""
    return [
        cls.__dict__["_compute_old_log_prob"]
        for cls in trainer_class.__mro__
        if "_compute_old_log_prob" in cls.__dict__
    ]


def test_every_mode_of_v1_is_known() -> None:
    assert {compat.known_trainer(trainer_class).path for trainer_class in TRAINER_REGISTRY.values()} <= {
        trainer.path for trainer in TRAINERS
    }


@pytest.mark.parametrize("base", [*KNOWN, SeparateRayPPOTrainer, PPOTrainer], ids=lambda base: base.__name__)
def test_a_subclass_is_refused_by_name(base: type) -> None:
    mine = type("MyTrainer", (base,), {"__module__": "my_recipe"})
    with pytest.raises(
        HookError, match=r"the trainer my_recipe\.MyTrainer is not known.*PPOTrainerSync.*leave \+rollout_corr out"
    ):
        compat.known_trainer(mine)


def test_v1_refuses_before_the_trainer_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []
    init = driver_v1.wrap_init(lambda self, config: built.append(config))
    mine = type("MyTrainer", (PPOTrainerSync,), {"__init__": init})
    with pytest.raises(HookError, match="MyTrainer is not known"):
        mine(configuration())
    assert not built
    mine(configuration(None))  # without a preset it is none of our business
    assert len(built) == 1


@pytest.mark.parametrize("base", [RayPPOTrainer, SeparateRayPPOTrainer])
def test_the_others_refuse_before_a_worker_starts(base: type) -> None:
    started: list[Any] = []
    start = driver_v0.wrap_workers_start(started.append)
    mine = object.__new__(type("MyTrainer", (base,), {}))
    mine.config = configuration()
    with pytest.raises(HookError, match="MyTrainer is not known"):
        start(mine)
    assert not started
    mine.config = configuration(None)
    start(mine)
    assert started == [mine]


def test_a_trainer_that_skips_the_start_is_refused_at_its_first_update() -> None:
    updated: list[Any] = []
    update = driver_v0.wrap_update_actor(lambda self, batch: updated.append(batch))
    mine = object.__new__(type("MyTrainer", (RayPPOTrainer,), {}))
    mine.config = configuration()
    with pytest.raises(HookError, match="MyTrainer is not known"):
        update(mine, SimpleNamespace())
    assert not updated


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was said in this process."""
    monkeypatch.setattr(activity, "_announced", {})


@pytest.mark.usefixtures("announced")
def test_a_known_trainer_says_in_its_process_what_is_active(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = object.__new__(OneStepOffRayTrainer)
    for _ in range(2):
        driver.admit(trainer, load_preset("k3_rs"), configuration())
    assert capsys.readouterr().out.count("[rollout_corr] active role=trainer") == 1


@pytest.mark.parametrize("preset", ["k3_rs", "bypass_ppo_clip_k3_rs"])
@pytest.mark.usefixtures("announced")
def test_an_actor_is_built_for_a_hooked_trainer_only(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the actor's process: the configuration as a hooked trainer hands it out, and as any other does."""
    monkeypatch.setattr(activity, "in_ray_actor", lambda: True)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WG_PREFIX", "actor")
    config = configuration(preset)
    with pytest.raises(
        HookError, match=r"the process of the trainer.*did not load the hook.*VERL_USE_EXTERNAL_PLUGINS"
    ):
        RolloutCorrPolicyLossConfig(**config.actor_rollout_ref.actor.policy_loss)
    driver.admit(object.__new__(OneStepOffRayTrainer), load_preset(preset), config)
    built = RolloutCorrPolicyLossConfig(**config.actor_rollout_ref.actor.policy_loss)
    assert built.rollout_corr_trainer == compat.known_trainer(OneStepOffRayTrainer).path


def test_outside_an_actor_the_configuration_is_built_before_there_is_a_trainer() -> None:
    """verl's main validates it in the driver and in the process that starts the trainer."""
    assert (
        RolloutCorrPolicyLossConfig(**configuration().actor_rollout_ref.actor.policy_loss).rollout_corr_trainer is None
    )
