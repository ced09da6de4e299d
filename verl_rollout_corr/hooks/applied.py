"""Counts of what the actor's loss was given: made where the loss runs, added up in the trainer."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class Counts:
    """Additive counts of micro-batches: scalar tensors, int64, except `weight_sum` (float64)."""

    tokens: Tensor
    """Response tokens."""
    kept: Tensor
    """The kept ones among them."""
    weight_sum: Tensor
    """The sum of the weights of the kept tokens; a weight is 1 where there are none."""
    empty_micro_batches: Tensor
    """Micro-batches with response tokens of which none was kept."""
    clipped: Tensor
    """Kept tokens that the clip of bypass mode's PPO silences."""
    digest: Tensor
    """The digest of the decision that the loss received (`proof.decision_digests`), modulo 2^64."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, name) + getattr(other, name) for name in _FIELDS))

    def __reduce__(self) -> tuple[Callable[[Tensor], Counts], tuple[Tensor]]:
        # Pickled after the mini-batch, with one copy to the host: the bits of the float64 travel as an int64.
        bits = [self.weight_sum.view(torch.int64), *(getattr(self, name) for name in _WHOLE)]
        return _from_bits, (torch.stack(bits).cpu(),)


def _from_bits(bits: Tensor) -> Counts:
    weight_sum, *whole = bits.unbind()
    return Counts(weight_sum=weight_sum.view(torch.float64), **dict(zip(_WHOLE, whole, strict=True)))


_FIELDS = tuple(field.name for field in fields(Counts))
_WHOLE = tuple(name for name in _FIELDS if name != "weight_sum")


@dataclass(frozen=True)
class Applied:
    """The counts by data-parallel rank. `a + b` joins micro-batches, ranks, epochs and updates."""

    by_rank: Mapping[int, Counts]

    @classmethod
    def to_micro_batch(
        cls,
        rank: int,
        mask: Tensor,
        kept: Tensor,
        weights: Tensor | None,
        clipped: Tensor | None = None,
        digests: Tensor | None = None,
    ) -> Applied:
        """The counts of one micro-batch, on its device: `mask`, `kept`, `clipped` (B, T) bool; `weights` (B, T), or
        None for 1; `digests` (B,).
        """
        tokens, left = mask.sum(), kept.sum()
        return cls(
            {
                rank: Counts(
                    tokens=tokens,
                    kept=left,
                    weight_sum=(
                        left
                        if weights is None
                        else torch.where(kept, weights, torch.zeros_like(weights)).double().sum()
                    ).double(),
                    empty_micro_batches=((tokens > 0) & (left == 0)).long(),
                    clipped=torch.zeros_like(left) if clipped is None else (kept & clipped).sum(),
                    digest=torch.zeros_like(left) if digests is None else digests.sum(),
                )
            }
        )

    def __add__(self, other: Applied) -> Applied:
        joined = dict(self.by_rank)
        for rank, counts in other.by_rank.items():
            joined[rank] = joined[rank] + counts if rank in joined else counts
        return Applied(joined)

    @functools.cached_property
    def total(self) -> Counts:
        """The counts of all ranks."""
        return functools.reduce(operator.add, self.by_rank.values())

    @property
    def tokens(self) -> int:
        """Response tokens, each as often as it was trained on."""
        return int(self.total.tokens)

    @property
    def kept(self) -> int:
        """The kept ones among them."""
        return int(self.total.kept)

    @property
    def weight_sum(self) -> float:
        """The sum of the weights of the kept tokens; a weight is 1 where there are none."""
        return float(self.total.weight_sum)

    @property
    def empty_micro_batches(self) -> int:
        """Micro-batches with response tokens of which none was kept."""
        return int(self.total.empty_micro_batches)

    @property
    def clipped(self) -> int:
        """Kept tokens that the clip of bypass mode's PPO silences."""
        return int(self.total.clipped)

    @property
    def digest(self) -> int:
        """The digest of the decisions that the loss received, modulo 2^64."""
        return int(self.total.digest) % 2**64

    @property
    def empty_ranks(self) -> list[int]:
        """Ranks with response tokens of which none was kept."""
        return [rank for rank, counts in sorted(self.by_rank.items()) if int(counts.tokens) and not int(counts.kept)]
