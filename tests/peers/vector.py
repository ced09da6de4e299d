"""The cross-peer vector: four rows on which the frameworks of the survey were run or transcribed (August 2026)."""

from __future__ import annotations

import torch

LOG_RATIOS = [
    [0.1, -1.5, 0.8, -10.0, 0.3],
    [0.0, 0.0, 5.0, 0.2, -0.1],  # the 5 is a tool's token
    [1.5, -1.5, 0.0, 7.0, 7.0],  # the 7s are padding
    [4e-4, 8e-4, -2e-4, 6e-4, 2e-4],
]
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])


def log_probs(log_ratios: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs below 0 with the given differences: the larger of the two policies has log-prob -0.5."""
    difference = torch.tensor(log_ratios, dtype=torch.float64)
    train = torch.where(difference >= 0, -0.5, -0.5 + difference)
    return train, torch.where(difference >= 0, -0.5 - difference, -0.5)


TRAIN, ROLLOUT = log_probs(LOG_RATIOS)
