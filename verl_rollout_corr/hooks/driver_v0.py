"""RayPPOTrainer and its descendants (one_step_off, fully_async): the seam of `verl.trainer.ppo.ray_trainer`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from verl_rollout_corr.grammar import Mode
from verl_rollout_corr.hooks import compat, driver
from verl_rollout_corr.hooks.advantages import spec_of_run
from verl_rollout_corr.hooks.first_invalid import ROW
from verl_rollout_corr.hooks.fully_async import STATISTICS_KEY
from verl_rollout_corr.hooks.transport import Carried
from verl_rollout_corr.hooks.weight_versions import history_of
from verl_rollout_corr.hooks.worker import HORIZON, KEEP, STALENESS


def wrap_workers_start(original: Callable[..., Any]) -> Callable[..., Any]:
    """Before the first worker of a trainer starts: refuses an unknown trainer, and says what is active."""

    @functools.wraps(original)
    def start(self: Any, *args: Any, **kwargs: Any) -> Any:
        spec = spec_of_run(self.config)
        if spec is not None:
            driver.admit(self, spec, self.config)
        return original(self, *args, **kwargs)

    return start


def row_staleness(trainer: Any, batch: Any, updates: int) -> torch.Tensor:
    """(B,) int64: published versions between the oldest weights that sampled the row and those after `updates` updates;
    -1 unknown.
    """
    versions = batch.non_tensor_batch.get("min_global_steps")
    if versions is None:
        return torch.full((len(batch),), -1, dtype=torch.int64)
    return history_of(trainer.actor_rollout_wg).lags(versions, updates)


def wrap_update_actor(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decides over the whole batch, ships the decision as columns, and reports what the workers did with it."""

    @functools.wraps(original)
    def _update_actor(self: Any, batch: Any) -> Any:
        spec = spec_of_run(self.config)
        if spec is None:
            return original(self, batch)
        known = compat.known_trainer(type(self))
        columns = {name: batch.batch[name] for name in batch.batch.keys()}  # noqa: SIM118 - iterating a TensorDict gives its rows
        lags = row_staleness(self, batch, driver.old_policy_updates(self, spec, known))
        sums = keep = None
        shipped = batch.select(deepcopy=False)
        if spec.mode is Mode.BYPASS:
            driver.check_rollout(columns, spec)
            shipped.batch[STALENESS] = lags
            shipped.batch[ROW] = torch.arange(len(lags))
        else:
            result = driver.decide_batch(columns, spec, uid=batch.non_tensor_batch.get("uid"), staleness=lags)
            keep, sums = result.keep, result.sums
            shipped.batch[KEEP] = keep
            if result.weights is not None:
                shipped.batch["rollout_is_weights"] = result.weights
        shipped.meta_info[HORIZON] = driver.horizon(self.config)
        output = original(self, shipped)
        history_of(self.actor_rollout_wg).updates += 1
        metrics = output.meta_info["metrics"]
        workers = driver.take_worker_statistics(metrics, "actor/")
        if keep is not None:
            driver.check_applied(
                workers.applied, keep, columns["response_mask"], self.config.actor_rollout_ref.actor.ppo_epochs
            )
        statistics, values = driver.conclude(self, spec, sums, workers, columns["response_mask"])
        metrics.update(values)
        if known.joins_updates:
            metrics[STATISTICS_KEY] = Carried((statistics, driver.state_of(self).seen))
        return output

    return _update_actor
