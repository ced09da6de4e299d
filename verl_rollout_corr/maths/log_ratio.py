"""The log-ratio l = log pi_train - log mu, and the only exponential of one.

Everything is padded (B, T) and float64 from here on, whatever came in: a bf16 log-prob cannot hold the difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EXPONENT_LIMIT = 20.0
"""Exponents of finite log-ratios are clipped to [-20, 20], after aggregation."""


@dataclass(frozen=True)
class TokenLogProbs:
    """The two log-probs of each sampled token, (B, T) float64; 0 outside `mask`, (B, T) bool.

    `precision`: what the inputs could hold, float64 or float32 (also for narrower ones). Bounds are compared in it.
    """

    train: Tensor
    rollout: Tensor
    mask: Tensor
    precision: torch.dtype = torch.float64

    @property
    def log_ratio(self) -> Tensor:
        """l_t = log pi_train(a_t) - log mu(a_t), 0 outside the mask; -inf where pi_train gives no probability."""
        return self.train - self.rollout

    @property
    def finite(self) -> Tensor:
        """(B, T) bool: response tokens to which pi_train gives probability, so that l is a number."""
        return self.mask & (self.train != -torch.inf)


def token_log_probs(train_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> TokenLogProbs:
    """Both log-probs widened to float64 before anything is subtracted, detached, and 0 outside `mask` ((B, T) bool)."""
    zero = torch.zeros((), dtype=torch.float64, device=mask.device)
    exact = train_log_probs.dtype is torch.float64 and rollout_log_probs.dtype is torch.float64
    return TokenLogProbs(
        train=torch.where(mask, train_log_probs.detach().double(), zero),
        rollout=torch.where(mask, rollout_log_probs.detach().double(), zero),
        mask=mask,
        precision=torch.float64 if exact else torch.float32,
    )


def not_below(values: Tensor, lower: float | None, precision: torch.dtype) -> Tensor:
    """Where values >= lower, compared in `precision`; everywhere if `lower` is None.

    Bounds are inclusive for whoever writes 0.5 and feeds float32: its log 0.5 is below float64's by a rounding.
    """
    if lower is None:
        return torch.ones_like(values, dtype=torch.bool)
    narrow = values.to(precision)
    # torch rounds the bound to the tensor's format too, in which what is too large for it would equal infinity.
    return torch.where(narrow.isfinite(), narrow >= lower, values >= lower)


def not_above(values: Tensor, upper: float | None, precision: torch.dtype) -> Tensor:
    """Where values <= upper, compared in `precision`; everywhere if `upper` is None."""
    if upper is None:
        return torch.ones_like(values, dtype=torch.bool)
    narrow = values.to(precision)
    return torch.where(narrow.isfinite(), narrow <= upper, values <= upper)


def ratio(exponent: Tensor) -> Tensor:
    """exp(clip(x, -20, 20)) of an aggregated log-ratio x; exactly 0 for x = -inf. Range [0, e^20]."""
    clipped = torch.exp(exponent.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT))
    return torch.where(exponent == -torch.inf, torch.zeros_like(clipped), clipped)
