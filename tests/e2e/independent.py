"""One optimiser step computed again from the dumped batch: transformers and plain torch, nothing of verl or of the
package.

The decisions come from tests/oracle, fed with the log-probs of this forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from oracle.decisions import Decided, decide
from transformers import AutoModelForCausalLM

from e2e.dumped import Row, Step


@dataclass(frozen=True)
class Recomputed:
    """What verl logs as actor/pg_loss and actor/grad_norm, and the decisions behind them."""

    loss: float
    grad_norm: float
    log_probs: list[torch.Tensor]
    decided: Decided


def load(model: Path) -> torch.nn.Module:
    """The assets' model in fp32, as the actor starts with it."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    return loaded.eval()


def log_probs(model: torch.nn.Module, row: Row, temperature: float) -> torch.Tensor:
    """Log-probs of the response tokens of one row, without padding."""
    logits = model(input_ids=row.input_ids[None]).logits[0, row.prompt - 1 : -1].float() / temperature
    response = row.input_ids[row.prompt :]
    return torch.log_softmax(logits, dim=-1).gather(1, response[:, None])[:, 0]


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


def first_step(model_path: Path, step: Step, *, corrected: bool = True, mini_batches: int = 1) -> Recomputed:
    """The policy loss (token-mean over all response tokens) and the gradient norm of the run's first update.

    With `corrected=False` every weight is 1 and every token is kept.
    """
    assert mini_batches == 1, "the weights are the assets' only at the first update"
    model = load(model_path)
    config = step.config
    rows = step.rows
    outputs = [log_probs(model, row, step.temperature) for row in rows]
    detached = [output.detach() for output in outputs]
    decided = decisions(step, detached, config)
    tokens = sum(int(row.mask.sum()) for row in rows)
    loss = torch.zeros(())
    for i, (row, output) in enumerate(zip(rows, outputs, strict=True)):
        weights, keep = torch.ones(len(output)), torch.ones(len(output), dtype=torch.bool)
        if corrected:
            keep = torch.tensor(decided.padded("keep")[i][: len(output)]).bool()
            if decided.token_weights is not None:
                weights = torch.tensor(decided.padded("weights")[i][: len(output)])
        old = row.rollout if config["mode"] == "bypass" else detached[i]
        assert old is not None
        losses = _token_losses(config["mode"], config["loss"], output, old, row, weights)
        loss = loss + torch.where(keep & row.mask, losses, torch.zeros_like(losses)).sum()
    loss = loss / tokens
    loss.backward()
    squares = [parameter.grad.double().pow(2).sum() for parameter in model.parameters() if parameter.grad is not None]
    return Recomputed(float(loss.detach()), float(torch.stack(squares).sum().sqrt()), detached, decided)
