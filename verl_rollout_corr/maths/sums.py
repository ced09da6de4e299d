"""Additive statistics: what a batch leaves behind, so that metrics do not depend on how it was cut.

Law: with `+`, `Sums` of one layout are a commutative monoid with `Sums.zero(config)` as neutral element, and the sums
of a batch are the sum of the sums of its parts. Every entry is a plain sum, or a maximum (a minimum is the maximum of
the negated value). Second moments are taken about fixed constants: about the batch's own mean they would not add.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from verl_rollout_corr.errors import InputError
from verl_rollout_corr.grammar import RolloutCorrConfig


@dataclass(frozen=True)
class Sums:
    """Totals and maxima of a batch, float64 on its device, in the order that `total_names` and `maximum_names` give.

    Two `Sums` add if they come from configurations with the same statistics.
    """

    total_names: tuple[str, ...]
    maximum_names: tuple[str, ...]
    totals: Tensor
    maxima: Tensor

    @classmethod
    def of(cls, totals: Mapping[str, Tensor], maxima: Mapping[str, Tensor]) -> Sums:
        """From scalar tensors by name; stacks them without a host copy."""
        return cls(
            total_names=tuple(totals),
            maximum_names=tuple(maxima),
            totals=torch.stack([value.double() for value in totals.values()]),
            maxima=torch.stack([value.double() for value in maxima.values()]),
        )

    @classmethod
    def zero(cls, config: RolloutCorrConfig) -> Sums:
        """The neutral element for batches corrected with `config`: the sums of an empty batch."""
        from verl_rollout_corr.maths.collection import collect_nothing

        return collect_nothing(config)

    def __add__(self, other: object) -> Sums:
        if not isinstance(other, Sums):
            return NotImplemented
        if (self.total_names, self.maximum_names) != (other.total_names, other.maximum_names):
            differing = set(self.total_names + self.maximum_names) ^ set(other.total_names + other.maximum_names)
            raise InputError(
                "sums of different configurations do not add: only one side has "
                f"{', '.join(sorted(differing)) or 'this order'}; correct every part of a batch with the same "
                "configuration"
            )
        return Sums(
            self.total_names,
            self.maximum_names,
            self.totals + other.totals.to(self.totals.device),
            torch.maximum(self.maxima, other.maxima.to(self.maxima.device)),
        )

    def __radd__(self, other: object) -> Sums:
        return self if other == 0 else NotImplemented  # sum() starts with 0

    def to(self, device: torch.device | str) -> Sums:
        """The same sums on another device."""
        return Sums(self.total_names, self.maximum_names, self.totals.to(device), self.maxima.to(device))

    def __reduce__(self) -> tuple[type[Sums], tuple[tuple[str, ...], tuple[str, ...], Tensor, Tensor]]:
        # To another process they travel as host memory; there they need no device.
        return Sums, (self.total_names, self.maximum_names, self.totals.cpu(), self.maxima.cpu())

    def to_host(self) -> tuple[dict[str, float], dict[str, float]]:
        """(totals, maxima) by name: the one host copy."""
        joined: list[float] = cast(Any, torch.cat([self.totals, self.maxima])).tolist()  # torch's stub: unknown
        count = len(self.total_names)
        return dict(zip(self.total_names, joined[:count], strict=True)), dict(
            zip(self.maximum_names, joined[count:], strict=True)
        )
