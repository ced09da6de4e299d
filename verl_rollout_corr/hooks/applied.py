"""What the actor's loss was given: counted where it runs, added up on the trainer."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Applied:
    """Additive counts by data-parallel rank: float64 tensors (5,) of response tokens, kept tokens, the sum of the
    weights of the kept tokens, micro-batches with response tokens of which none was kept, and kept tokens that the clip
    of bypass mode's PPO silences.

    `a + b` joins micro-batches, ranks, epochs and updates.
    """

    by_rank: Mapping[int, torch.Tensor]

    @classmethod
    def to_micro_batch(
        cls,
        rank: int,
        mask: torch.Tensor,
        kept: torch.Tensor,
        weights: torch.Tensor | None,
        clipped: torch.Tensor | None = None,
    ) -> Applied:
        """The counts of one micro-batch, on its device: `mask`, `kept`, `clipped` (B, T) bool; `weights` (B, T), or
        None for 1.
        """
        tokens, left = mask.sum().double(), kept.sum().double()
        weight_sum = left if weights is None else torch.where(kept, weights, torch.zeros_like(weights)).double().sum()
        nothing_left = ((tokens > 0) & (left == 0)).double()
        silenced = torch.zeros_like(left) if clipped is None else (kept & clipped).sum().double()
        return cls({rank: torch.stack([tokens, left, weight_sum, nothing_left, silenced])})

    def __add__(self, other: Applied) -> Applied:
        joined = dict(self.by_rank)
        for rank, counts in other.by_rank.items():
            joined[rank] = joined[rank] + counts if rank in joined else counts
        return Applied(joined)

    def __reduce__(self) -> tuple[type[Applied], tuple[dict[int, torch.Tensor]]]:
        return Applied, ({rank: counts.cpu() for rank, counts in self.by_rank.items()},)

    @functools.cached_property
    def _totals(self) -> list[float]:
        return functools.reduce(operator.add, (counts.cpu() for counts in self.by_rank.values())).tolist()

    @property
    def tokens(self) -> int:
        """Response tokens, each as often as it was trained on."""
        return round(self._totals[0])

    @property
    def kept(self) -> int:
        """The kept ones among them."""
        return round(self._totals[1])

    @property
    def weight_sum(self) -> float:
        """The sum of the weights of the kept tokens; a weight is 1 where there are none."""
        return self._totals[2]

    @property
    def empty_micro_batches(self) -> int:
        """Micro-batches with response tokens of which none was kept."""
        return round(self._totals[3])

    @property
    def clipped(self) -> int:
        """Kept tokens that the clip of bypass mode's PPO silences."""
        return round(self._totals[4])

    @property
    def empty_ranks(self) -> list[int]:
        """Ranks with response tokens of which none was kept."""
        return [rank for rank, counts in sorted(self.by_rank.items()) if float(counts[0]) > 0 and float(counts[1]) == 0]
