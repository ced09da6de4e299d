"""Small batches from log-ratios, for the cases."""

from __future__ import annotations

import math
from typing import Any

import torch

from verl_rollout_corr import Correction, correct

PREFIX = "rollout_corr/"


def from_log_ratios(*rows: list[float], base: float = -12.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs whose differences are the given ones, with mu at `base`; all response tokens."""
    log_ratios = torch.tensor(rows, dtype=torch.float64)
    rollout = torch.full_like(log_ratios, base)
    return rollout + log_ratios, rollout, torch.ones_like(log_ratios)


def from_ratios(*rows: list[float], base: float = -12.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same from ratios pi_train / mu."""
    return from_log_ratios(*([math.log(r) for r in row] for row in rows), base=base)


def ask(batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor], config: Any = None, **optional: Any) -> Correction:
    """`correct` on a batch; without a configuration: metrics only."""
    return correct(*batch, {} if config is None else config, **optional)


def metric(found: Correction, name: str) -> float:
    """One metric by its name after the prefix."""
    return found.metrics[PREFIX + name]
