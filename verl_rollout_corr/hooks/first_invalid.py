"""Where the first invalid log-prob of a micro-batch is. The loss finds it without waiting for the device, and it is
read before the optimiser steps.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from verl_rollout_corr.maths.inputs import invalid_tokens


class FirstInvalid(NamedTuple):
    """The lowest row with an invalid log-prob (+inf where all are valid), its first one, the trainer's log-prob there,
    and how many rows have one.
    """

    row: float
    position: float
    value: float
    rows: float

    def __str__(self) -> str:
        return f"{self.value} at row {int(self.row)}, position {int(self.position)}"


def first_invalid(rows: Tensor, train_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
    """(4,) float64, on the device: a `FirstInvalid` of one micro-batch. `rows` (B,) are the numbers of its rows, the
    others (B, T).
    """
    bad = invalid_tokens(train_log_probs, rollout_log_probs, mask.bool())
    count, width = bad.shape
    position = torch.arange(width, device=bad.device, dtype=torch.float64).expand(count, width)
    number = torch.where(bad, rows.double()[:, None], torch.inf)
    places = torch.stack([number, position, train_log_probs.double()], dim=-1).flatten(end_dim=1)
    places = torch.cat([places, nowhere(bad.device)[None, :3]])
    first = (places[:, 0] * max(width, 1) + places[:, 1]).argmin(dim=0, keepdim=True)
    return torch.cat([places.index_select(0, first)[0], bad.any(dim=1).sum().double()[None]])


def nowhere(device: torch.device) -> Tensor:
    """(4,): what `first_invalid` gives where all log-probs are valid, except for what nobody reads of it."""
    return torch.full((4,), math.inf, dtype=torch.float64, device=device)
