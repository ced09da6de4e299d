"""What verl's losses divide by: the tokens and sequences that count, and the longest response."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_rollout_corr.errors import HookError
from verl_rollout_corr.grammar import Denominator, RolloutCorrConfig
from verl_rollout_corr.hooks import wire
from verl_rollout_corr.hooks.places import padded


def count_kept(worker: Any, data: TensorDict) -> None:
    """With `denominator: kept`: writes the kept tokens and sequences of the mini-batch, over all ranks, beside it."""
    keep = padded(data, (wire.KEEP,)).get(wire.KEEP)
    if keep is None:
        raise HookError(f"rollout_corr: denominator: kept and the actor's mini-batch has no column {wire.KEEP}")
    kept = keep.bool()
    counts = torch.stack([kept.sum(), kept.any(dim=1).sum()]).to(worker.device_name, torch.int64)
    group = worker.engine.get_data_parallel_group()
    if group is not None:  # torchtitan has none where one rank's share is the whole mini-batch
        torch.distributed.all_reduce(counts, group=group)
    tokens, sequences = counts.tolist()  # verl's loss divides by Python numbers: one host copy per mini-batch
    tu.assign_non_tensor(data, **{wire.KEPT_TOKENS: tokens, wire.KEPT_SEQUENCES: sequences})


def _kept_counts(data: TensorDict) -> tuple[int, int]:
    tokens = tu.get_non_tensor_data(data=data, key=wire.KEPT_TOKENS, default=None)
    sequences = tu.get_non_tensor_data(data=data, key=wire.KEPT_SEQUENCES, default=None)
    if tokens is None or sequences is None:
        raise HookError(
            "rollout_corr: denominator: kept needs the kept tokens of the whole mini-batch, and this worker does not "
            "run verl's TrainingWorker.train_batch; set rollout_corr.denominator=all"
        )
    return tokens, sequences


def set_counts(changed: TensorDict, keep: torch.Tensor, mask: torch.Tensor, config: RolloutCorrConfig) -> None:
    """Writes into a micro-batch what the means of its loss divide by, and the mask of the tokens in them."""
    tokens = changed["batch_num_tokens"]
    if config.denominator is Denominator.KEPT:
        tokens, sequences = _kept_counts(changed)
        changed["response_mask"] = torch.where(keep, mask, torch.zeros_like(mask))
        tu.assign_non_tensor(changed, global_batch_size=max(sequences, 1))
    # A mini-batch without a token to count has numerators of exactly 0; 0/0 would make it NaN.
    tu.assign_non_tensor(changed, batch_num_tokens=max(tokens, 1) if tokens is not None else None)


def _needs_horizon(actor: Any) -> bool:
    return actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.loss_scale_factor is None


def with_horizon(actor: Any, data: TensorDict) -> Any:
    """The actor's configuration with a constant to divide by. Verl alone would divide by the longest response of the
    micro-batch, so the loss would depend on how a batch is cut.
    """
    if not _needs_horizon(actor):
        return actor
    horizon = tu.get_non_tensor_data(data=data, key=wire.HORIZON, default=None)
    if horizon is None:
        raise HookError(
            f"rollout_corr: the actor's batch does not say {wire.HORIZON}, which loss_agg_mode=seq-mean-token-sum-norm "
            "divides by: the trainer's process did not correct it. Set actor_rollout_ref.actor.loss_scale_factor"
        )
    changed = copy.copy(actor)
    object.__setattr__(changed, "loss_scale_factor", horizon)  # verl freezes its configurations
    return changed
