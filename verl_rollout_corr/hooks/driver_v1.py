"""The V1 trainer (sync, colocate_async, separate_async): the seams of `verl.trainer.ppo.v1.trainer_base`.

The batch lives in verl's TransferQueue; its columns are nested tensors over the response.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.workers.utils.padding import response_to_nested

from verl_rollout_corr.errors import HookError
from verl_rollout_corr.grammar import Mode
from verl_rollout_corr.hooks import compat, driver
from verl_rollout_corr.hooks.advantages import spec_of_run
from verl_rollout_corr.hooks.first_invalid import ROW
from verl_rollout_corr.hooks.weight_versions import history_of
from verl_rollout_corr.hooks.worker import HORIZON, KEEP, STALENESS
from verl_rollout_corr.maths.correction import Correction

_FIELDS = ["uid", "response_mask", "rollout_log_probs", "old_log_probs", "advantages"]


def wrap_init(original: Callable[..., None]) -> Callable[..., None]:
    """Before the first worker of a trainer starts: refuses an unknown trainer, and says what is active."""

    @functools.wraps(original)
    def __init__(self: Any, config: Any) -> None:
        spec = spec_of_run(config)
        if spec is not None:
            driver.admit(self, spec, config)
        original(self, config)

    return __init__


def row_staleness(trainer: Any, batch: Any, updates: int) -> torch.Tensor:
    """(B,) int64: published versions between the oldest weights that sampled the row and those after `updates` updates;
    -1 unknown.
    """
    versions = [None if tag.get("is_padding", False) else tag.get("min_global_steps") for tag in batch.tags]
    return history_of(trainer.actor_rollout_wg).lags(versions, updates)


def _fetch(batch: Any) -> tuple[dict[str, torch.Tensor], Any, torch.Tensor]:
    """Padded columns, uids and the nested mask of the batch."""
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=_FIELDS)
    nested_mask = data["response_mask"]
    uid = data.pop("uid").tolist()
    return dict(data.to_padded_tensor().items()), uid, nested_mask


def _ship(batch: Any, fields: dict[str, torch.Tensor]) -> Any:
    """Writes our columns into the queue and returns the batch description that names them: workers fetch only named
    fields.
    """
    extra_info = dict(batch.extra_info)
    updated: Any = tq.kv_batch_put(
        keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(fields, batch_size=len(batch))
    )
    missing = set(fields) - set(updated.fields)
    if missing:
        raise HookError(f"rollout_corr: the TransferQueue did not take the columns {sorted(missing)}")
    updated.extra_info.update(extra_info)
    return updated


def wrap_update_actor(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decides over the whole batch, ships the decision to the workers, and reports what they did with it."""

    @functools.wraps(original)
    def _update_actor(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        spec = spec_of_run(self.config)
        if spec is None:
            return original(self, batch, metrics)
        known = compat.known_trainer(type(self))
        columns, uid, nested_mask = _fetch(batch)
        lags = row_staleness(self, batch, driver.old_policy_updates(self, spec, known))
        result = None
        if spec.mode is Mode.BYPASS:
            driver.check_rollout(columns, spec)
            fields = {STALENESS: lags, ROW: torch.arange(len(lags))}
        else:
            result = driver.decide_batch(columns, spec, uid=uid, staleness=lags)
            fields = _decision_columns(result, nested_mask)
        batch = _ship(batch, fields)
        batch.extra_info[HORIZON] = driver.horizon(self.config)
        output = original(self, batch, metrics)
        history_of(self.actor_rollout_wg).updates += 1
        workers = driver.take_worker_statistics(metrics, "actor/")
        if result is not None:
            epochs = self.config.actor_rollout_ref.actor.ppo_epochs
            driver.check_applied(workers.applied, result.keep, columns["response_mask"], epochs)
        sums = None if result is None else result.sums
        padding = sum(bool(tag.get("is_padding", False)) for tag in batch.tags)
        statistics, values = driver.conclude(self, spec, sums, workers, columns["response_mask"], padding=padding)
        driver.state_of(self).step.append(statistics)
        metrics.update(values)
        return output

    return _update_actor


def _decision_columns(result: Correction, nested_mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """The decision in the queue's form."""
    fields = {KEEP: response_to_nested(result.keep, nested_mask)}
    if result.weights is not None:
        fields["rollout_is_weights"] = response_to_nested(result.weights, nested_mask)
    return fields


def wrap_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """With several updates per step, replaces verl's averages of our metrics by those of the joined sums."""

    @functools.wraps(original)
    def step(self: Any, metrics: dict[str, Any], timing_raw: dict[str, Any]) -> Any:
        if spec_of_run(self.config) is None:
            return original(self, metrics, timing_raw)
        state = driver.state_of(self)
        state.step.clear()
        result = original(self, metrics, timing_raw)
        if state.step:
            metrics.update(driver.joined(state.step).metrics(state.seen))
        return result

    return step
