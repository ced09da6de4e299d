"""The V1 trainer (sync, colocate_async, separate_async): the batch lives in verl's TransferQueue, as jagged columns
over the response. It is corrected in this layout, and the decision goes back in it: nothing is padded on the way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor

from verl_rollout_corr.errors import HookError
from verl_rollout_corr.hooks import driver
from verl_rollout_corr.hooks.batches import TrainerBatch
from verl_rollout_corr.hooks.configured import config_of_run
from verl_rollout_corr.hooks.entrance import rollout_log_probs_of
from verl_rollout_corr.hooks.updates import joined, state_of

_FIELDS = ["uid", "response_mask", "responses", "rollout_log_probs", "old_log_probs", "advantages"]


def _is_padding(tag: dict[str, Any]) -> bool:
    """Whether verl added the row to make the batch divisible."""
    return bool(tag.get("is_padding", False))


def oldest_versions(batch: Any) -> list[Any]:
    """The number of the oldest weights that sampled each row, None where it is not known."""
    return [None if _is_padding(tag) else tag.get("min_global_steps") for tag in batch.tags]


class QueueAdapter:
    """The rows of one update in the TransferQueue."""

    def __init__(self, original: Callable[..., Any], trainer: Any, batch: Any, metrics: dict[str, Any]) -> None:
        self._original = original
        self._trainer = trainer
        self._batch = batch
        self._metrics = metrics

    def fetch(self, more: Sequence[str] = ()) -> TrainerBatch:
        """The columns that a correction reads; the queue leaves out what no row has."""
        columns = tq.kv_batch_get(
            keys=self._batch.keys, partition_id=self._batch.partition_id, select_fields=[*_FIELDS, *more]
        )
        group_ids = columns.pop("uid").tolist()
        return TrainerBatch(
            dict(columns.items()),
            group_ids=group_ids,
            versions=oldest_versions(self._batch),
            padding=sum(_is_padding(tag) for tag in self._batch.tags),
            added=tuple(_is_padding(tag) for tag in self._batch.tags),
        )

    def ship(self, columns: dict[str, Tensor], beside: dict[str, Any]) -> None:
        """Writes them into the queue. Workers fetch only the columns that the description of the batch names, so the
        description that the write returns replaces the old one.
        """
        extra_info = dict(self._batch.extra_info)
        updated: Any = tq.kv_batch_put(
            keys=self._batch.keys,
            partition_id=self._batch.partition_id,
            fields=TensorDict(columns, batch_size=len(self._batch)),
        )
        missing = set(columns) - set(updated.fields)
        if missing:
            raise HookError(f"rollout_corr: the TransferQueue did not take the columns {sorted(missing)}")
        updated.extra_info.update(extra_info | beside)
        self._batch = updated

    def train(self) -> tuple[Any, dict[str, Any]]:
        """Runs verl's `_update_actor` on the new description."""
        return self._original(self._trainer, self._batch, self._metrics), self._metrics


def wrap_init(original: Callable[..., None]) -> Callable[..., None]:
    """Before the first worker of a trainer starts: refuses an unknown trainer, and says what is active."""

    @functools.wraps(original)
    def __init__(self: Any, config: Any) -> None:
        ours = config_of_run(config)
        if ours is not None:
            driver.admit(self, ours, config)
        original(self, config)

    return __init__


def wrap_compute_old_log_prob(original: Callable[..., Any]) -> Callable[..., Any]:
    """Checks the engine's log-probs where the trainer first reads them: they must be there, and as many as the tokens.
    Verl pads them here for metrics of its own, and fails with a KeyError if there are none.
    """

    @functools.wraps(original)
    def _compute_old_log_prob(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        if config_of_run(self.config) is not None:
            fields = ["response_mask", "rollout_log_probs"]
            rollout_log_probs_of(
                tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
            )
        return original(self, batch, metrics)

    return _compute_old_log_prob


def wrap_update_actor(original: Callable[..., Any]) -> Callable[..., Any]:
    """Corrects the update. `step` makes a line of the log of it, alone or joined with the other updates of the step."""

    @functools.wraps(original)
    def _update_actor(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        config = config_of_run(self.config)
        if config is None:
            return original(self, batch, metrics)
        output, _, statistics = driver.update_actor(self, config, QueueAdapter(original, self, batch, metrics))
        state_of(self).waiting.append(statistics)
        return output

    return _update_actor


def wrap_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the metrics of the step's updates, computed from their joined sums. Verl would average, add or take the
    largest of what each update reports, depending on parts of the metric's name.
    """

    @functools.wraps(original)
    def step(self: Any, metrics: dict[str, Any], timing_raw: dict[str, Any]) -> Any:
        config = config_of_run(self.config)
        if config is None:
            return original(self, metrics, timing_raw)
        state = state_of(self)
        state.waiting.clear()
        result = original(self, metrics, timing_raw)
        if state.waiting:  # none while only the critic is trained
            metrics.update(state.line(self.config, config, joined(state.waiting)))
        return result

    return step
