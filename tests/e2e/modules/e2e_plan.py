"""Gives every update of a run a configuration of its own: E2E_PLAN is a JSON file, a list with one entry per update.

An entry: `rollout_corr`, the configuration as JSON text; `loss_mode` and `bypass`, what a preset tells verl with it;
and `run`, {dotted key of verl's configuration: value}. The trainer and the actor read them at each update, each from
the configuration that its process has, so both are changed, each before its part of the update.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import e2e_updates
from e2e_after_import import after_import

ACTOR = "actor_rollout_ref.actor."
PLAN: list[dict[str, Any]] = json.loads(Path(os.environ["E2E_PLAN"]).read_text())
_first: dict[str, Any] = {}
"""Of every key that the plan changes, the value that the run was started with."""


def entry(number: int) -> dict[str, Any]:
    """What update `number`, counted from 1, is to be; the last entry holds for all that follow."""
    return PLAN[min(number, len(PLAN)) - 1]


def _values(number: int) -> dict[str, Any]:
    """The changed keys of verl's configuration. What an earlier entry changed and this one does not is as it was."""
    chosen = entry(number)
    return (
        _first
        | chosen["run"]
        | {
            "algorithm.rollout_correction.rollout_corr": chosen["rollout_corr"],
            "algorithm.rollout_correction.bypass_mode": chosen["bypass"],
            ACTOR + "policy_loss.rollout_corr": chosen["rollout_corr"],
            ACTOR + "policy_loss.loss_mode": chosen["loss_mode"],
        }
    )


def _remember(read: Any) -> None:
    for key in {key for one in PLAN for key in one["run"]} - set(_first):
        _first[key] = read(key)


# --- the trainer's process


def change_trainer(trainer: Any, number: int) -> None:
    """Sets the trainer's configuration, a struct of OmegaConf, to that of update `number`."""
    from omegaconf import OmegaConf

    _remember(lambda key: OmegaConf.select(trainer.config, key))
    for key, value in _values(number).items():
        OmegaConf.update(trainer.config, key, value)


def _before(method: str, only: str | None = None) -> Any:
    """A change of a module's trainer class: update by update, its method finds the plan's configuration."""

    def change(trainer_class: Any) -> None:
        original = getattr(trainer_class, method)
        calls = 0

        @functools.wraps(original)
        def planned(self: Any, *positional: Any, **named: Any) -> Any:
            nonlocal calls
            if only is None or type(self).__name__ == only:
                calls += 1
                change_trainer(self, calls)
            return original(self, *positional, **named)

        setattr(trainer_class, method, planned)

    return change


def _v1(trainer_base: ModuleType) -> None:
    _before("_step_once")(trainer_base.PPOTrainer)


def _v0(ray_trainer: ModuleType) -> None:
    """The first that its loop calls in a step; its descendants call it when they send prompts, long before."""
    _before("_get_gen_batch", only="RayPPOTrainer")(ray_trainer.RayPPOTrainer)


def _separate(ray_trainer: ModuleType) -> None:
    """one_step_off and fully_async."""
    _before("_fit_compute_log_prob")(ray_trainer.SeparateRayPPOTrainer)


# --- the actor's process


def _change_actor(worker: Any, number: int) -> None:
    config, engine = worker.loss_fn.keywords["config"], worker.engine

    def owner(key: str) -> tuple[Any, str]:
        if key == "use_dynamic_bsz":
            return worker.engine_config, key
        if key == "ppo_max_token_len_per_gpu":
            return worker.engine_config, "max_token_len_per_gpu"
        *parents, name = key.split(".")
        return functools.reduce(getattr, parents, config), name

    _remember(lambda key: getattr(*owner(key.removeprefix(ACTOR))) if key.startswith(ACTOR) else None)
    for key, value in _values(number).items():
        if key == ACTOR + "optim.lr":
            _learning_rate(engine, value)
        elif key.startswith(ACTOR):
            place, name = owner(key.removeprefix(ACTOR))
            object.__setattr__(place, name, value)  # verl freezes its configurations


def _learning_rate(engine: Any, value: float) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = group["initial_lr"] = value
    engine.lr_scheduler.base_lrs = [value] * len(engine.lr_scheduler.base_lrs)


after_import("verl.trainer.ppo.v1.trainer_base", _v1)
after_import("verl.trainer.ppo.ray_trainer", _v0)
after_import("verl.experimental.separation.ray_trainer", _separate)
e2e_updates.before_update(_change_actor)
