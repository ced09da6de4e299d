"""RayPPOTrainer and its descendants (one_step_off, fully_async): the seam of `verl.trainer.ppo.ray_trainer`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from verl_rollout_corr.errors import HookError
from verl_rollout_corr.grammar import Mode
from verl_rollout_corr.hooks import driver
from verl_rollout_corr.hooks.advantages import spec_of_run
from verl_rollout_corr.hooks.worker import KEEP, STALENESS, STEP


def row_staleness(trainer: Any, batch: Any) -> torch.Tensor:
    """(B,) int64: weight versions between the oldest that sampled the row and the trainer's, -1 where verl does not know.

    fully_async counts versions itself (current_param_version); the others publish one per step, at the end of the step before.
    """
    rows = len(batch)
    versions = batch.non_tensor_batch.get("min_global_steps")
    if versions is None:
        return torch.full((rows,), -1, dtype=torch.int64)
    current = getattr(trainer, "current_param_version", None)
    if current is None:
        current = trainer.global_steps - 1
    lags = [-1 if version is None or int(version) < 0 else max(current - int(version), 0) for version in versions]
    return torch.tensor(lags, dtype=torch.int64)


def wrap_update_actor(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decides over the whole batch, ships the decision as columns, and reports what the workers did with it."""

    @functools.wraps(original)
    def _update_actor(self: Any, batch: Any) -> Any:
        spec = spec_of_run(self.config)
        if spec is None:
            return original(self, batch)
        state = driver.state_of(self)
        columns = {name: batch.batch[name] for name in batch.batch.keys()}
        lags = row_staleness(self, batch)
        sums = keep = None
        shipped = batch.select(deepcopy=False)
        if spec.mode is Mode.BYPASS:
            driver.check_rollout(columns, spec)
            shipped.batch[STALENESS] = lags
        else:
            result = driver.decide_batch(
                columns, spec, uid=batch.non_tensor_batch.get("uid"), staleness=lags, state=state
            )
            keep, sums = result.keep, result.sums
            shipped.batch[KEEP] = keep
            if result.weights is not None:
                shipped.batch["rollout_is_weights"] = result.weights
        shipped.meta_info[STEP] = self.global_steps
        output = original(self, shipped)
        metrics = output.meta_info["metrics"]
        applied, worker_sums = driver.take_worker_statistics(metrics, "actor/")
        if keep is not None:
            driver.check_applied(
                applied, keep, columns["response_mask"], self.config.actor_rollout_ref.actor.ppo_epochs
            )
        else:
            sums = worker_sums
        if sums is None:
            raise HookError("rollout_corr: the workers sent no statistics in bypass mode")
        metrics.update(driver.report(sums, applied, state, fresh=bool((lags == 0).any())))
        return output

    return _update_actor
