"""The seam's function around verl's own loss, called on log-probs that a test chooses instead of a model's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils import losses
from verl.workers.utils.padding import left_right_2_no_padding

from hooks import rows as forms
from hooks.rows import Row
from verl_rollout_corr.configuration.parser import parse, to_mapping
from verl_rollout_corr.configuration.run_check import BYPASS_LOSS_MODE
from verl_rollout_corr.hooks import compat, ledger, policy_loss
from verl_rollout_corr.hooks.worker import wrap_ppo_loss

VERL_LOSSES = sorted(set(POLICY_LOSS_REGISTRY) - {BYPASS_LOSS_MODE})
"""Every policy loss that verl registers."""

hooked = wrap_ppo_loss(losses.ppo_loss)


@dataclass(frozen=True)
class Result:
    """The loss, its gradient by row (T,) with respect to the log-probs, and the metrics."""

    loss: Tensor
    gradients: list[Tensor]
    metrics: dict[str, Any]


def configuration(
    mapping: dict[str, Any] | None, monkeypatch: Any, *, loss_mode: str | None = None, **actor: Any
) -> Any:
    """verl's actor configuration; with a preset's node unless `mapping` is None. No seam is applied to this process."""
    monkeypatch.setattr(compat, "apply_module", lambda module: None)
    more = {"dro_beta": 0.5, "clip_cov_ratio": 0.2, "clip_cov_lb": -5.0, "kl_cov_ratio": 0.3}
    if mapping is None:
        node = PolicyLossConfig(loss_mode=loss_mode or "vanilla", **more)
    else:
        parsed = parse(mapping)
        mode = loss_mode or ("rollout_corr" if parsed.mode == "bypass" else "vanilla")
        text = json.dumps(to_mapping(parsed))
        node = policy_loss.RolloutCorrPolicyLossConfig(loss_mode=mode, rollout_corr=text, **more)
    return FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=node, **actor)


def call(
    config: Any,
    rows: list[Row],
    *,
    function: Any = hooked,
    form: str = "queue",
    fill: float = 0.0,
    log_probs: list[Tensor] | None = None,
    entropy: bool = False,
    tokens: int | None = None,
    sequences: int | None = None,
    **beside: Any,
) -> Result:
    """Calls the loss on one micro-batch that is the whole batch.

    `log_probs` are those of the response tokens (T,), by default a little off `old_log_probs`; prompts have -1.
    `tokens` and `sequences` are what means divide by, by default the response tokens and the rows.
    """
    columns = forms.queue_form(rows) if form == "queue" else forms.padded_form(rows, fill=fill)
    data = tu.get_tensordict(columns, {})
    data = left_right_2_no_padding(data) if form == "padded" else data
    masked = sum(int(row.mask.sum()) for row in rows)
    tu.assign_non_tensor(
        data,
        dp_size=1,
        batch_num_tokens=masked if tokens is None else tokens,
        global_batch_size=len(rows) if sequences is None else sequences,
        rollout_corr_update=0,
        rollout_corr_kept_tokens=tokens,
        rollout_corr_kept_sequences=sequences,
        **beside,
    )
    log_probs = current(rows) if log_probs is None else log_probs
    leaves = [value.clone().requires_grad_() for value in log_probs]
    # The output at a position is about the next token, so it starts with the last token of the prompt.
    flat = torch.cat(
        [
            torch.cat([torch.full((len(row.prompt) - 1,), -1.0), leaf, torch.full((1,), -1.0)])
            for row, leaf in zip(rows, leaves, strict=True)
        ]
    )
    offsets = data["input_ids"].offsets()
    output = {"log_probs": torch.nested.nested_tensor_from_jagged(flat, offsets)}
    if entropy:
        output["entropy"] = torch.nested.nested_tensor_from_jagged(-flat, offsets)
    with ledger.opened():
        loss, metrics = function(config=config, model_output=output, data=data)
        loss.backward()
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return Result(loss.detach(), gradients, metrics)


def current(rows: list[Row], *, seed: int = 5) -> list[Tensor]:
    """log pi_theta of the response tokens: old_log_probs plus noise."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (row.columns["old_log_probs"] + 0.2 * torch.randn(len(row.mask), generator=generator)).clamp(max=-1e-3)
        for row in rows
    ]
