"""Copies where verl moves weights to the CPU to keep them, and they are there already."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from verl_rollout_corr.platform.shims import Shim


def copy_saved_shards(original: Callable[..., tuple[dict[str, Any], Any]]) -> Callable[..., tuple[dict[str, Any], Any]]:
    """Saves copies of the shards, not the shards.

    Needed by verl/utils/fsdp_utils.py, fsdp2_sharded_save_to_cpu, which saves `tensor.cpu()`: on a CPU that is the live
    parameter itself. The asynchronous trainers save pi_old with it at the start of a cycle and restore it for the later
    updates of the cycle (DetachActorWorker.save_model_to_cpu); without a copy they restore the weights that they have.
    Can go when verl saves with copy=True, as its FSDP1 twin does.
    """

    @functools.wraps(original)
    def fsdp2_sharded_save_to_cpu(model: Any) -> tuple[dict[str, Any], Any]:
        saved, spec = original(model)
        return {name: (shard.clone(), shard_spec) for name, (shard, shard_spec) in saved.items()}, spec

    return fsdp2_sharded_save_to_cpu


SHIM = Shim("verl", "verl.utils.fsdp_utils", "fsdp2_sharded_save_to_cpu", ("model",), copy_saved_shards)
"""Installed with the checkpoint engine `gloo`, which every asynchronous run on a CPU uses."""
