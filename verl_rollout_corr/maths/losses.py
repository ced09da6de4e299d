"""The policy losses of bypass mode, per token, and what a mean over tokens or sequences divides by.

What goes into them is on docs/policy-losses.md. Pure functions of tensors: no host synchronisation and no collective.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_rollout_corr.errors import ConfigError
from verl_rollout_corr.grammar import Denominator
from verl_rollout_corr.maths.log_ratio import ratio

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
    """max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A) with r = pi_theta / mu.

    PPO, Schulman et al. (2017), arXiv 1707.06347, eq. 7. With `clip_c` the loss of a negative advantage is at most
    -c A (dual clip, Ye et al. (2019), arXiv 1912.09729, eq. 5). Importance weights are not applied, since r is one.

    Args:
        log_prob: (B, T) log pi_theta(a_t), with the graph.
        rollout_log_probs: (B, T) log mu(a_t).
        advantages: (B, T).
        clip_low: how far r may fall below 1, in [0, 1].
        clip_high: how far r may rise above 1, >= 0.
        clip_c: the bound of the dual clip, > 1; None for none.

    Returns:
        (B, T), minimised. The exponent of r is clipped to [-20, 20] and carries no gradient beyond; r is 0 where
        pi_theta(a_t) = 0. Where an input is NaN or infinite, so is the loss, and no gradient passes.
    """
    log_ratio = log_prob - rollout_log_probs.detach()
    scale = advantages.detach()
    usable = scale.isfinite() & (log_ratio.isfinite() | (log_ratio == -torch.inf))
    # Selected before the exponential: if after it, 0 * inf in the backward pass would reach the model as NaN.
    policy_ratio = ratio(torch.where(usable, log_ratio, torch.zeros_like(log_ratio)))
    scale = torch.where(usable, scale, torch.zeros_like(scale))
    loss = torch.maximum(-scale * policy_ratio, -scale * policy_ratio.clamp(1 - clip_low, 1 + clip_high))
    if clip_c is not None:
        loss = torch.where(scale < 0, torch.minimum(loss, -scale * clip_c), loss)
    return torch.where(usable, loss, torch.full_like(loss, torch.nan))


def clipped(
    log_prob: Tensor, rollout_log_probs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Where the clip of `ppo_clip` leaves no gradient: r is beyond the bound on the side to which A pushes it.

    (B, T) bool, from the arguments of `ppo_clip`; False where one of them is NaN. The dual clip is not counted.
    """
    policy_ratio = ratio(log_prob.detach() - rollout_log_probs.detach())
    above = (advantages > 0) & (policy_ratio > 1 + clip_high)
    return above | ((advantages < 0) & (policy_ratio < 1 - clip_low))


def reinforce(log_prob: Tensor, weights: Tensor | None, advantages: Tensor) -> Tensor:
    """-sg(w_t) A_t log pi_theta(a_t), whose gradient is -w_t A_t grad log pi_theta(a_t).

    REINFORCE (Williams 1992) with importance weights. Without the stop-gradient, A log pi_theta grad w would be added.

    Args:
        log_prob: (B, T) log pi_theta(a_t), with the graph.
        weights: (B, T) importance weights; None is w = 1.
        advantages: (B, T).

    Returns:
        (B, T), minimised. 0, without gradient, where pi_theta(a_t) = 0, since that log-prob has no gradient.
        Where an input is NaN, so is the loss, and no gradient passes.
    """
    scale = advantages.detach() if weights is None else weights.detach() * advantages.detach()
    impossible = log_prob == -torch.inf
    usable = log_prob.isfinite() & scale.isfinite()
    inside = torch.where(usable, log_prob, torch.zeros_like(log_prob))
    loss = -torch.where(usable, scale, torch.zeros_like(scale)) * inside
    return torch.where(usable | (impossible & scale.isfinite()), loss, torch.full_like(loss, torch.nan))


def aggregate(
    loss_mat: Tensor,
    mask: Tensor,
    keep: Tensor,
    loss_agg_mode: str,
    *,
    denominator: Denominator = Denominator.ALL,
    scale: float | None = None,
) -> Tensor:
    """The scalar loss of a whole batch; a rejected token contributes 0 to the numerator.

    token-mean: sum / tokens. token-sum: sum. seq-mean-token-sum: sum / rows. seq-mean-token-sum-norm: the same / scale.
    seq-mean-token-mean: mean over rows of (sum of the row / tokens of the row).

    Args:
        loss_mat: (B, T) per-token loss; may be NaN or infinite where not kept.
        mask: (B, T), 0 and 1: response tokens.
        keep: (B, T), 0 and 1: what rejection left of them.
        loss_agg_mode: one of `AGGREGATION_MODES`.
        denominator: `all` counts every response token (row), so that rejection never raises the step size;
            `kept` counts only kept tokens (rows with one). Rows without a response token never count.
        scale: divides `seq-mean-token-sum-norm`; None is T.

    Returns:
        A scalar; everything rejected, or nothing there, gives exactly 0, connected to the graph.

    Raises:
        ConfigError: an unknown `loss_agg_mode`.
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
        # A batch of no columns has nothing to divide.
        loss = loss / (max(loss_mat.shape[1], 1) if scale is None else scale)
    return loss
