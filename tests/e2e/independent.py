"""One optimiser step computed again from the recorded batch: transformers and plain torch, nothing of verl or of the
package.

The decisions come from tests/oracle, fed with the log-probs of this forward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from oracle.decisions import Decided, decide
from transformers import AutoModelForCausalLM

from e2e.records import Row, Step


@dataclass(frozen=True)
class Recomputed:
    """What verl logs as actor/pg_loss, actor/loss and actor/grad_norm, and the decisions behind them."""

    loss: float
    total: float
    grad_norm: float
    log_probs: list[torch.Tensor]
    decided: Decided


@functools.lru_cache(maxsize=1)
def load(model: Path) -> torch.nn.Module:
    """The assets' model in fp32, as the actor starts with it. Nobody may change its parameters."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    return loaded.eval()


def forward(model: torch.nn.Module, row: Row, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the response tokens of one row, and the entropies of their distributions; without padding."""
    logits = model(input_ids=row.input_ids[None]).logits[0, row.prompt - 1 : -1].float() / temperature
    response = row.input_ids[row.prompt :]
    log_probs = torch.log_softmax(logits, dim=-1)
    return log_probs.gather(1, response[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(dim=-1)


def _pad(rows: list[torch.Tensor]) -> list[list[float]]:
    width = max(len(row) for row in rows)
    return [[float(v) for v in row.tolist()] + [0.0] * (width - len(row)) for row in rows]


def decisions(step: Step, train: list[torch.Tensor], config: Mapping[str, Any]) -> Decided:
    """Weights and keep of the whole batch, from these log-probs of the trainer and the engine's."""
    rollout = [row.rollout for row in step.rows]
    return decide(
        _pad(train),
        _pad(rollout),  # type: ignore[arg-type]
        step.padded("mask"),
        config,
        advantages=step.padded("advantages"),
        staleness=step.lags,
    )


def _token_losses(
    mode: str, loss: str, log_prob: torch.Tensor, old: torch.Tensor, row: Row, weights: torch.Tensor
) -> torch.Tensor:
    """PPO-clip without its clip (at the first update the ratio to pi_old is 1), PPO-clip on pi_theta / mu, or
    REINFORCE.
    """
    advantages = row.columns["advantages"]
    if mode == "bypass" and loss == "reinforce":
        return -weights * advantages * log_prob
    ratio = torch.exp(log_prob - old)
    clipped = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    dual = torch.where(advantages < 0, torch.minimum(clipped, -advantages * 3.0), clipped)
    return dual * weights


def first_step(
    model_path: Path,
    step: Step,
    *,
    entropy_coeff: float = 0.0,
    corrected: bool = True,
    divisor: float | None = None,
) -> Recomputed:
    """Losses (the sum over all response tokens by their number, or by `divisor`) and gradient norm of the run's first
    update.

    With `corrected=False` every weight is 1 and every token is kept. A KL to the reference is 0 here: its weights are
    equal.
    """
    model, config, rows = load(model_path), step.config, step.rows
    model.zero_grad(set_to_none=True)
    outputs = [forward(model, row, step.temperature) for row in rows]
    detached = [log_probs.detach() for log_probs, _ in outputs]
    decided = decisions(step, detached, config)
    policy, entropy = torch.zeros(()), torch.zeros(())
    for i, (row, (log_prob, entropies)) in enumerate(zip(rows, outputs, strict=True)):
        weights, keep = torch.ones(len(log_prob)), torch.ones(len(log_prob), dtype=torch.bool)
        if corrected:
            keep = torch.tensor(decided.padded("keep")[i][: len(log_prob)]).bool()
            if decided.token_weights is not None:
                weights = torch.tensor(decided.padded("weights")[i][: len(log_prob)])
        old = row.rollout if config["mode"] == "bypass" else detached[i]
        assert old is not None
        losses = _token_losses(config["mode"], config["loss"], log_prob, old, row, weights)
        policy = policy + losses[keep & row.mask].sum()
        entropy = entropy + entropies[keep & row.mask].sum()
    tokens = divisor or sum(int(row.mask.sum()) for row in rows)
    total = (policy - entropy_coeff * entropy) / tokens
    total.backward()
    squares = [parameter.grad.double().pow(2).sum() for parameter in model.parameters() if parameter.grad is not None]
    return Recomputed(
        loss=float(policy.detach() / tokens),
        total=float(total.detach()),
        grad_norm=float(torch.stack(squares).sum().sqrt()),
        log_probs=detached,
        decided=decided,
    )
