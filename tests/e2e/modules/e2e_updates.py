"""Which update of the actor this process is in, counted from 1 since the process started, whatever the trainer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from e2e_after_import import after_import

Callback = Callable[[Any, int], None]
_callbacks: list[Callback] = []
_number = 0


def number() -> int:
    """The update that is running or was the last one; 0 before the first."""
    return _number


def before_update(callback: Callback) -> None:
    """Calls `callback(training_worker, number)` in the actor's process before each of its updates."""
    _callbacks.append(callback)


def is_actors(loss_function: Any) -> bool:
    """Whether this is the loss of the actor, and not the critic's."""
    return getattr(getattr(loss_function, "func", None), "__name__", "") == "ppo_loss"


def _count(engine_workers: ModuleType) -> None:
    original = engine_workers.ActorRolloutRefWorker.update_actor

    @functools.wraps(original)  # with the attributes by which verl dispatches the method
    def update_actor(self: Any, data: Any) -> Any:
        global _number
        _number += 1
        for callback in _callbacks:
            callback(self.actor, _number)
        return original(self, data)

    engine_workers.ActorRolloutRefWorker.update_actor = update_actor


after_import("verl.workers.engine_workers", _count)
