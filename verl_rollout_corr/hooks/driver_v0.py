"""RayPPOTrainer and its descendants (one_step_off, fully_async): the batch is a DataProto of padded columns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from verl_rollout_corr.hooks import compat, driver, wire
from verl_rollout_corr.hooks.batches import TrainerBatch
from verl_rollout_corr.hooks.configured import config_of_run
from verl_rollout_corr.hooks.entrance import check_sampled
from verl_rollout_corr.hooks.transport import Carried
from verl_rollout_corr.hooks.updates import state_of


def oldest_versions(batch: Any) -> Sequence[Any]:
    """The number of the oldest weights that sampled each row, None where it is not known."""
    versions = batch.non_tensor_batch.get("min_global_steps")
    return [None] * len(batch) if versions is None else versions


class ProtoAdapter:
    """A DataProto. The workers get a shallow copy with our columns, so that the trainer's own is not changed."""

    def __init__(self, original: Callable[..., Any], trainer: Any, batch: Any) -> None:
        self._original = original
        self._trainer = trainer
        self._batch = batch
        self._shipped = batch

    def fetch(self, more: Sequence[str] = ()) -> TrainerBatch:
        """All columns, as views."""
        check_sampled(self._batch.non_tensor_batch)
        columns = self._batch.batch
        return TrainerBatch(
            {name: columns[name] for name in columns.keys()},  # noqa: SIM118 - iterating a TensorDict gives its rows
            group_ids=self._batch.non_tensor_batch.get("uid"),
            versions=oldest_versions(self._batch),
        )

    def ship(self, columns: dict[str, Tensor], beside: dict[str, Any]) -> None:
        """Adds them to the copy."""
        # Without the names, `select` hands out the trainer's own columns.
        self._shipped = self._batch.select(batch_keys=list(self._batch.batch.keys()), deepcopy=False)
        for name, column in columns.items():
            self._shipped.batch[name] = column
        self._shipped.meta_info = self._batch.meta_info | beside

    def train(self) -> tuple[Any, dict[str, Any]]:
        """Runs verl's `_update_actor` on the copy."""
        output = self._original(self._trainer, self._shipped)
        return output, output.meta_info["metrics"]


def wrap_workers_start(original: Callable[..., Any]) -> Callable[..., Any]:
    """Before the first worker of a trainer starts: refuses an unknown trainer, and says what is active."""

    @functools.wraps(original)
    def start(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = config_of_run(self.config)
        if config is not None:
            driver.admit(self, config, self.config)
        return original(self, *args, **kwargs)

    return start


def wrap_update_actor(original: Callable[..., Any]) -> Callable[..., Any]:
    """Corrects the update. Each update is a line of the log, except where the trainer joins several (fully_async)."""

    @functools.wraps(original)
    def _update_actor(self: Any, batch: Any) -> Any:
        config = config_of_run(self.config)
        if config is None:
            return original(self, batch)
        output, metrics, statistics = driver.update_actor(self, config, ProtoAdapter(original, self, batch))
        line = functools.partial(state_of(self).line, self.config, config)
        if compat.known_trainer(type(self)).joins_updates:
            metrics[wire.STATISTICS_METRIC] = Carried((statistics, line))
        else:
            metrics.update(line(statistics))
        return output

    return _update_actor
