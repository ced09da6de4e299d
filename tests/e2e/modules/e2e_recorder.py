"""Writes what the actor's loss was given, into the folder E2E_RECORDS: the ground truth of what was trained on.

One file per micro-batch, `update{number:06d}_rank{rank}_{count:04d}.pt`, which torch.load(weights_only=True) reads.
Two places are looked at. The batch on its way to the loss: padded columns before anything of them is neutralised, and
the forward pass. And the arguments that verl's own policy loss is called with in the end, which say what was kept and
what it was multiplied with: a token that does not train has a log-prob of exactly 0 there.
"""

from __future__ import annotations

import functools
import itertools
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import e2e_updates
import torch
from e2e_after_import import after_import

COLUMNS = ("response_mask", "old_log_probs", "advantages", "ref_log_prob")
TOKENS = ("rollout_log_probs", "input_ids", "prompts", "responses", "attention_mask")

_count = itertools.count()
_arrived: dict[str, torch.Tensor | None] = {}
"""What verl's policy loss was called with last."""


def _watch_policy_loss(losses: ModuleType) -> None:
    find = losses.get_policy_loss_fn

    @functools.wraps(find)
    def get_policy_loss_fn(name: str) -> Any:
        policy_loss = find(name)

        @functools.wraps(policy_loss)
        def watched(*positional: Any, **named: Any) -> Any:
            assert not positional, "verl's ppo_loss names what it hands over"
            for argument in ("log_prob", "response_mask", "rollout_is_weights"):
                value = named.get(argument)
                _arrived[argument] = None if value is None else value.detach().cpu().clone()
            return policy_loss(**named)

        return watched

    losses.get_policy_loss_fn = get_policy_loss_fn


def _watch_engine(engine: ModuleType) -> None:
    original = engine.FSDPEngineWithLMHead.forward_step

    @functools.wraps(original)
    def forward_step(self: Any, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        if forward_only or not e2e_updates.is_actors(loss_function):
            return original(self, micro_batch, loss_function, forward_only)

        def recorded(*, model_output: Any, data: Any, dp_group: Any = None) -> Any:
            record = _before(loss_function.keywords["config"], model_output, data)
            loss, metrics = loss_function(model_output=model_output, data=data, dp_group=dp_group)
            _write(record | _after(loss))
            return loss, metrics

        # prepare_model_outputs is handed the loss too, and looks at it for distillation only.
        return original(self, micro_batch, recorded, forward_only)

    engine.FSDPEngineWithLMHead.forward_step = forward_step


def _before(config: Any, model_output: dict[str, Any], data: Any) -> dict[str, Any]:
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import no_padding_2_padding

    present = [name for name in COLUMNS if name in data]
    padded = data.select(*present).to_padded_tensor()
    temperature = tu.get_non_tensor_data(data=data, key="temperature", default=None)
    return {
        "columns": {name: padded[name].detach().cpu().clone() for name in present},
        "log_prob": no_padding_2_padding(model_output["log_probs"].detach(), data).cpu().clone(),
        **{name: _tokens(data, name) for name in TOKENS},
        "lags": data["rollout_corr_staleness"].tolist() if "rollout_corr_staleness" in data else None,
        "temperature": float(temperature.flatten()[0]) if isinstance(temperature, torch.Tensor) else temperature,
        "batch_num_tokens": data["batch_num_tokens"],
        "global_batch_size": data["global_batch_size"],
        "dp_size": data["dp_size"],
        "loss_agg_mode": config.loss_agg_mode,
        "config": getattr(config.policy_loss, "rollout_corr", None),
    }


def _after(loss: torch.Tensor) -> dict[str, Any]:
    log_prob, mask = _arrived["log_prob"], _arrived["response_mask"]
    assert log_prob is not None and mask is not None
    return {
        "keep": mask.bool() & (log_prob != 0),
        "rollout_is_weights": _arrived["rollout_is_weights"],
        "loss": float(loss.detach()),
    }


def _tokens(data: Any, name: str) -> Any:
    if name not in data:
        return None
    column = data[name]
    return [row.cpu().clone() for row in column.unbind()] if column.is_nested else column.cpu().clone()


def _write(record: dict[str, Any]) -> None:
    rank = int(os.environ.get("RANK", "0"))
    folder = Path(os.environ["E2E_RECORDS"])
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"update{e2e_updates.number():06d}_rank{rank}_{next(_count):04d}.pt"
    partial = target.with_suffix(".partial")
    torch.save(record | {"update": e2e_updates.number(), "rank": rank}, partial)
    partial.rename(target)


after_import("verl.workers.utils.losses", _watch_policy_loss)
after_import("verl.workers.engine.fsdp.transformer_impl", _watch_engine)
