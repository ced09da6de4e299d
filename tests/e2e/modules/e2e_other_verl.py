"""A verl in which a function that we replace is another one: E2E_CHANGE is `signature`, `names` or `method`."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

from e2e_after_import import after_import


def _signature(engine_workers: ModuleType) -> None:
    original = engine_workers.ppo_loss

    def ppo_loss(config: Any, model_output: Any, data: Any, group: Any = None, chunk: int = 0) -> Any:
        return original(config, model_output, data, group)

    engine_workers.ppo_loss = ppo_loss  # type: ignore[attr-defined]


def _names(engine_workers: ModuleType) -> None:
    original = engine_workers.ppo_loss

    def ppo_loss(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        return original(config, model_output, data, dp_group)

    engine_workers.ppo_loss = ppo_loss  # type: ignore[attr-defined]


def _method(trainer_base: ModuleType) -> None:
    trainer_base.PPOTrainer._update_policy = trainer_base.PPOTrainer._update_actor
    del trainer_base.PPOTrainer._update_actor


change = os.environ["E2E_CHANGE"]
if change == "method":
    after_import("verl.trainer.ppo.v1.trainer_base", _method)
else:
    after_import("verl.workers.engine_workers", {"signature": _signature, "names": _names}[change])
