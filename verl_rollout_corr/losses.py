"""The policy losses of bypass mode, per token, and what a mean over tokens or sequences divides by (contract sections 7 and 8)."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_rollout_corr.errors import ConfigError
from verl_rollout_corr.grammar import Denominator
from verl_rollout_corr.log_ratio import EXPONENT_LIMIT

AGGREGATION_MODES: tuple[str, ...] = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)
"""verl's `loss_agg_mode`."""


def ppo_clip(
    log_prob: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float | None = None,
) -> Tensor:
    """max(-r A, -clip(r, 1 - low, 1 + high) A) with r = pi_theta / mu (PPO, arXiv 1707.06347, eq. 7), (B, T).

    With `clip_c` (dual clip, arXiv 1912.09729, eq. 5) the loss of a negative advantage is at most -c A. Weights are not applied: r is one already.
    The exponent is clipped to [-20, 20], and carries no gradient beyond.
    """
    ratio = torch.exp((log_prob - rollout_log_probs.detach()).clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT))
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    if clip_c is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * clip_c), loss)


def reinforce(log_prob: Tensor, weights: Tensor | None, advantages: Tensor) -> Tensor:
    """-sg(w_t) A_t log pi_theta(a_t) (REINFORCE with importance weights), (B, T); `weights` None is w = 1.

    Its gradient is -w A grad log pi_theta: without the stop-gradient the term A log pi_theta grad w would be added.
    """
    scale = -advantages.detach() if weights is None else -(weights.detach() * advantages.detach())
    # Weight 0 and log pi_theta = -inf come together (r = 0), and 0 * inf is NaN; r log r goes to 0.
    return torch.where(scale == 0, torch.zeros_like(log_prob), scale * log_prob)


def aggregate(
    loss_mat: Tensor,
    mask: Tensor,
    keep: Tensor,
    loss_agg_mode: str,
    *,
    denominator: Denominator = Denominator.ALL,
    scale: float | None = None,
) -> Tensor:
    """The scalar loss of a whole batch. A rejected token contributes 0 to the numerator, and to the count as `denominator` says.

    `all`: every response token (sequence) counts, so rejection never raises the step size. `kept`: only kept ones do.
    `scale` divides the sum of `seq-mean-token-sum-norm` (default T). Everything rejected gives exactly 0, connected to the graph.

    Args:
        loss_mat: (B, T) per-token loss; may be NaN or infinite where not kept.
        mask, keep: (B, T), 0 and 1.
    """
    if loss_agg_mode not in AGGREGATION_MODES:
        raise ConfigError(f"loss_agg_mode is {loss_agg_mode!r}; write one of {', '.join(AGGREGATION_MODES)}")
    kept = mask.bool() & keep.bool()
    counted = mask.bool() if denominator is Denominator.ALL else kept
    inside = torch.where(kept, loss_mat, torch.zeros_like(loss_mat))
    if loss_agg_mode == "token-sum":
        return inside.sum()
    if loss_agg_mode == "token-mean":
        return inside.sum() / counted.sum().clamp(min=1)
    per_row = inside.sum(dim=1)
    rows = counted.any(dim=1).sum().clamp(min=1)
    if loss_agg_mode == "seq-mean-token-mean":
        per_row = per_row / counted.sum(dim=1).clamp(min=1)
    loss = per_row.sum() / rows
    if loss_agg_mode == "seq-mean-token-sum-norm":
        loss = loss / (loss_mat.shape[1] if scale is None else scale)
    return loss
