"""Makes copies where verl saves weights by moving them to the CPU, since on a CPU nothing would be moved or copied."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from verl_rollout_corr.patching import Patch


def copy_saved_shards(original: Callable[..., tuple[dict[str, Any], Any]]) -> Callable[..., tuple[dict[str, Any], Any]]:
    """Saves copies of the shards, not the shards.

    Needed by verl/utils/fsdp_utils.py, fsdp2_sharded_save_to_cpu, which saves `tensor.cpu()`: on a CPU that is the live
    parameter itself. The asynchronous trainers save pi_old with it at the start of a cycle and restore it for the later
    updates of the cycle (DetachActorWorker.save_model_to_cpu); without a copy they restore the weights that they have.
    """

    @functools.wraps(original)
    def fsdp2_sharded_save_to_cpu(model: Any) -> tuple[dict[str, Any], Any]:
        saved, spec = original(model)
        return {name: (shard.clone(), shard_spec) for name, (shard, shard_spec) in saved.items()}, spec

    return fsdp2_sharded_save_to_cpu


SHIM = Patch(
    "verl.utils.fsdp_utils",
    "fsdp2_sharded_save_to_cpu",
    ("model",),
    ("cpu",),
    "verl_rollout_corr.platform.saved_weights:copy_saved_shards",
    "on a CPU it saves the live parameters themselves, so that an asynchronous trainer would restore what it has",
    "verl saves with copy=True, as its FSDP1 twin does",
)
"""Installed with the checkpoint engine `gloo`, which every asynchronous run on a CPU uses."""
