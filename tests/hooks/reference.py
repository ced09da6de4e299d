"""One optimiser step after another in a single process: a plain model, row by row, in float64.

Imports nothing of the package and nothing of verl.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hooks.rows import Row, token_log_probs

Decide = Callable[[Row, Tensor], tuple[Tensor, Tensor]]
"""Row and current log-probs (T,) -> keep (T,) bool and weights (T,)."""


@dataclass(frozen=True)
class Objective:
    """What is minimised, in the words of verl's actor configuration."""

    loss: str = "ppo_clip"  # ppo_clip | reinforce
    loss_agg_mode: str = "token-mean"
    denominator: str = "all"
    entropy_coeff: float = 0.0
    kl_loss_coef: float = 0.0
    horizon: int | None = None
    learning_rate: float = 0.02
    low: float = 0.2
    high: float = 0.2
    dual: float = 3.0


@dataclass(frozen=True)
class Step:
    """Before one optimiser step: gradients by name, the loss, and the log-probs (T,) of each row."""

    gradients: dict[str, Tensor]
    loss: float
    log_probs: list[Tensor]


def decision_in_columns(row: Row, log_prob: Tensor) -> tuple[Tensor, Tensor]:
    """Decoupled mode: the trainer has decided."""
    keep = row.columns["rollout_corr_keep"].bool()
    return keep, row.columns.get("rollout_is_weights", torch.ones(len(keep))).double()


def token_loss(objective: Objective, row: Row, log_prob: Tensor, entropy: Tensor, weights: Tensor, old: str) -> Tensor:
    """The loss of each response token, (T,)."""
    advantage = row.columns["advantages"].double()
    if objective.loss == "reinforce":
        policy = -weights * advantage * log_prob
    else:
        ratio = torch.exp(log_prob - row.columns[old].double())
        clipped = torch.clamp(ratio, 1 - objective.low, 1 + objective.high)
        policy = torch.maximum(-advantage * ratio, -advantage * clipped)
        policy = torch.where(advantage < 0, torch.minimum(policy, -advantage * objective.dual), policy) * weights
    total = policy - objective.entropy_coeff * entropy
    if objective.kl_loss_coef:
        gap = row.columns["ref_log_prob"].double() - log_prob
        total = total + objective.kl_loss_coef * (torch.exp(gap) - gap - 1)
    return total


def mean(objective: Objective, losses: list[Tensor], masks: list[Tensor], keeps: list[Tensor]) -> Tensor:
    """The scalar loss of a mini-batch; rejected tokens count as the objective's denominator says, and contribute
    nothing.
    """
    kept = [mask.bool() & keep for mask, keep in zip(masks, keeps, strict=True)]
    counted = kept if objective.denominator == "kept" else [mask.bool() for mask in masks]
    # verl's number of sequences is the size of the mini-batch, rows without a token included.
    sequences = sum(bool(row.any()) for row in kept) if objective.denominator == "kept" else len(masks)
    sums = [loss[row].sum() for loss, row in zip(losses, kept, strict=True)]
    if objective.loss_agg_mode == "token-sum":
        return torch.stack(sums).sum()
    if objective.loss_agg_mode == "token-mean":
        return torch.stack(sums).sum() / max(int(sum(row.sum() for row in counted)), 1)
    if objective.loss_agg_mode == "seq-mean-token-mean":
        sums = [total / max(int(row.sum()), 1) for total, row in zip(sums, counted, strict=True)]
    loss = torch.stack(sums).sum() / max(sequences, 1)
    if objective.loss_agg_mode == "seq-mean-token-sum-norm":
        assert objective.horizon is not None
        loss = loss / objective.horizon
    return loss


def train(
    model: Any,
    rows: list[Row],
    objective: Objective,
    decide: Decide = decision_in_columns,
    *,
    old: str = "old_log_probs",
    mini_batches: int = 1,
    epochs: int = 1,
) -> list[Step]:
    """The steps of plain gradient descent over the mini-batches in order; `model` is trained in place."""
    size = len(rows) // mini_batches
    steps: list[Step] = []
    for _ in range(epochs):
        for start in range(0, len(rows), size):
            steps.append(_step(model, rows[start : start + size], objective, decide, old))
    return steps


def _step(model: Any, rows: list[Row], objective: Objective, decide: Decide, old: str) -> Step:
    losses, keeps, log_probs = [], [], []
    for row in rows:
        log_prob, entropy = token_log_probs(model, row)
        keep, weights = decide(row, log_prob.detach())
        losses.append(token_loss(objective, row, log_prob, entropy, weights, old))
        keeps.append(keep)
        log_probs.append(log_prob.detach())
    loss = mean(objective, losses, [row.mask for row in rows], keeps)
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    gradients = {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(parameters.items(), found, strict=True)
    }
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter -= objective.learning_rate * gradients[name]
    return Step(gradients, loss.item(), log_probs)


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The norm of the difference over all parameters, relative to the norm of what is expected."""
    assert found.keys() == expected.keys()
    gap = torch.cat([(found[name].double() - expected[name].double()).flatten() for name in expected])
    scale = torch.cat([value.double().flatten() for value in expected.values()])
    return float(gap.norm() / scale.norm()) if scale.any() else float(gap.norm())
