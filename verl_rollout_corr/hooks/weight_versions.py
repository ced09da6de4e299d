"""Which weights sampled a row, in every trainer: from a record of what was published.

Verl stamps a row with the number that the trainer passed to `CheckpointEngineManager.update_weights`. Trainers number
differently: RayPPOTrainer and V1 publish version t after update t; one_step_off publishes version t before it, so that
its rows are one update older than their number; fully_async counts synchronisations. So each publication is recorded
together with the number of updates that the actor had made by then, and no formula per trainer is needed.
"""

from __future__ import annotations

import bisect
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from verl_rollout_corr.errors import HookError

_histories: WeakKeyDictionary[Any, WeightHistory] = WeakKeyDictionary()


class WeightHistory:
    """The updates of one actor, and its publications to the rollout engines."""

    def __init__(self) -> None:
        self.updates = 0
        """Calls of the trainer's _update_actor so far."""
        self._published: dict[int, int] = {}
        self._counts: list[int] = []

    def publish(self, version: int | None) -> None:
        """The engines now have the actor's weights under this number. None: the trainer gave no number."""
        if version is None:
            return
        # A number that is given twice keeps the older weights: rows sampled in between must not look fresher than they
        # are.
        self._published.setdefault(version, self.updates)
        if not self._counts or self._counts[-1] != self.updates:
            self._counts.append(self.updates)

    @property
    def last_published(self) -> int:
        """Updates behind the newest published weights."""
        return self._counts[-1] if self._counts else 0

    def lag(self, version: Any, updates: int) -> int:
        """Published versions between those weights and the ones after `updates` updates; -1 for a number never
        published.

        0 exactly when they are the same weights: updates since the last publication count as one more version.
        """
        sampled = self._published.get(int(version)) if version is not None else None
        if sampled is None:
            return -1
        passed = bisect.bisect_right(self._counts, updates) - bisect.bisect_right(self._counts, sampled)
        beyond = 1 if updates > max(sampled, self.last_published) else 0
        return max(passed, 0) + beyond

    def lags(self, versions: Iterable[Any], updates: int) -> torch.Tensor:
        """(B,) int64: `lag` of each row."""
        return torch.tensor([self.lag(version, updates) for version in versions], dtype=torch.int64)


def history_of(actor_worker_group: Any) -> WeightHistory:
    """The history of this actor, made on first use."""
    history = _histories.get(actor_worker_group)
    if history is None:
        history = _histories[actor_worker_group] = WeightHistory()
    return history


def wrap_update_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    """Records what is published. Verl's `auto_await` looks at the frame of its caller, so it must be the outermost
    wrapper again.
    """
    from verl.utils.ray_utils import auto_await

    inner = getattr(original, "__wrapped__", None)
    if not inspect.iscoroutinefunction(inner):
        raise HookError(
            "rollout_corr: CheckpointEngineManager.update_weights is no longer a coroutine under verl's auto_await, "
            "so the versions of the weights cannot be recorded; install a supported verl"
        )

    @auto_await
    @functools.wraps(inner)
    async def update_weights(self: Any, global_steps: int | None = None) -> Any:
        result = await inner(self, global_steps)
        history_of(self.actor_wg).publish(global_steps)
        return result

    return update_weights
