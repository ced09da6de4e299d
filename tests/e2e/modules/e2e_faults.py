"""A worker that does not do what the trainer decided. E2E_FAULT names what it does instead: `weights_swapped` in its
second update; `verls_loss` and `other_code` from the start, on the last rank alone.
"""

from __future__ import annotations

import functools
import inspect
import os
from types import ModuleType
from typing import Any

import e2e_updates
import torch
from e2e_after_import import after_import

FAULT = os.environ["E2E_FAULT"]
UPDATE = 2


def _swapped(column: torch.Tensor) -> torch.Tensor:
    """The first two tokens of each row that differ change places: counts and sums stay as they are."""
    rows = [row.clone() for row in column.unbind()]
    for row in rows:
        differing = (row != row[0]).nonzero()
        if len(differing):
            row[[0, int(differing[0])]] = row[[int(differing[0]), 0]]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _swap_weights(engine_workers: ModuleType) -> None:
    original = engine_workers.TrainingWorker.train_mini_batch

    @functools.wraps(original)
    def train_mini_batch(self: Any, data: Any) -> Any:
        if e2e_updates.is_actors(self.loss_fn) and e2e_updates.number() == UPDATE:
            data["rollout_is_weights"] = _swapped(data["rollout_is_weights"])
        return original(self, data)

    engine_workers.TrainingWorker.train_mini_batch = train_mini_batch


def _is_last_rank() -> bool:
    return os.environ.get("RANK") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1) and "WG_PREFIX" in os.environ


def _put_back(engine_workers: ModuleType) -> None:
    """Right before the worker binds its loss, which it does after it has made its configuration."""
    original = engine_workers.omega_conf_to_dataclass

    @functools.wraps(original)
    def omega_conf_to_dataclass(*positional: Any, **named: Any) -> Any:
        made = original(*positional, **named)
        if _is_last_rank():
            engine_workers.ppo_loss = inspect.unwrap(engine_workers.ppo_loss)
        return made

    engine_workers.omega_conf_to_dataclass = omega_conf_to_dataclass


def _other_code(package: ModuleType) -> None:
    if _is_last_rank():
        package.__version__ = "0.0.9"


if FAULT == "weights_swapped":
    after_import("verl.workers.engine_workers", _swap_weights)
elif FAULT == "verls_loss":
    after_import("verl.workers.engine_workers", _put_back)
elif FAULT == "other_code":
    after_import("verl_rollout_corr", _other_code)
