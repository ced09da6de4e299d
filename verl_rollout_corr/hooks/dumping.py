"""Writes what reached the actor's loss, when `rollout_corr.dump.dir` is set: the ground truth of what was trained on.

One file per micro-batch, `step{step:06d}_rank{rank}_{count:04d}.pt`, a dictionary that torch.load(weights_only=True)
reads: padded columns before rejected tokens are neutralised, keep, the log-probs of the forward pass, what the loss
divides by, and the loss.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding

from verl_rollout_corr.configuration.parser import to_mapping
from verl_rollout_corr.grammar import RolloutCorrConfig

STEP = "rollout_corr_step"
"""The step of the trainer, beside the columns."""

_count = itertools.count()


def wanted(spec: RolloutCorrConfig, data: TensorDict) -> bool:
    """Whether this micro-batch is to be written."""
    if spec.dump.dir is None:
        return False
    step = tu.get_non_tensor_data(data=data, key=STEP, default=None)
    return step is not None and (step - 1) % spec.dump.every == 0


def _tokens(data: TensorDict, name: str) -> Any:
    if name not in data:
        return None
    column = data[name]
    return [row.cpu() for row in column.unbind()] if column.is_nested else column.cpu()


def write(
    spec: RolloutCorrConfig,
    config: Any,
    data: TensorDict,
    model_output: dict[str, Any],
    columns: dict[str, torch.Tensor],
    keep: torch.Tensor,
    loss: torch.Tensor,
) -> Path:
    """Writes one micro-batch and returns the file. Synchronises the host, so only on the steps that were asked for."""
    assert spec.dump.dir is not None
    step = tu.get_non_tensor_data(data=data, key=STEP, default=0)
    rank = os.environ.get("RANK", "0")
    folder = Path(spec.dump.dir)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"step{step:06d}_rank{rank}_{next(_count):04d}.pt"
    record = {
        "step": step,
        "rank": int(rank),
        "columns": {name: column.detach().cpu() for name, column in columns.items()},
        "keep": keep.cpu(),
        "log_prob": no_padding_2_padding(model_output["log_probs"].detach(), data).cpu(),
        "rollout_log_probs": _tokens(data, "rollout_log_probs"),
        "input_ids": _tokens(data, "input_ids"),
        "prompts": _tokens(data, "prompts"),
        "responses": _tokens(data, "responses"),
        "attention_mask": _tokens(data, "attention_mask"),
        "temperature": _plain(tu.get_non_tensor_data(data=data, key="temperature", default=None)),
        "batch_num_tokens": data["batch_num_tokens"],
        "global_batch_size": data["global_batch_size"],
        "dp_size": data["dp_size"],
        "loss_agg_mode": config.loss_agg_mode,
        "loss": float(loss.detach()),
        "config": json.dumps(to_mapping(spec)),
    }
    partial = target.with_suffix(".partial")
    torch.save(record, partial)
    partial.rename(target)
    return target


def _plain(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
