"""Additive statistics of a batch, from which metrics are computed, so that they do not depend on how it was cut.

Law: with `+`, `Sums` of one layout are a commutative monoid with `Sums.zero(config)` as neutral element, and the sums
of a batch are the sum of the sums of its parts. `sum_table.py` says what each entry is. Second moments are taken about
fixed constants, because moments about each batch's own mean do not add.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from verl_rollout_corr.errors import InputError
from verl_rollout_corr.grammar import RolloutCorrConfig
from verl_rollout_corr.maths.histogram import COUNT
from verl_rollout_corr.maths.sum_table import LOG_RATIOS, Kind, Layout, Sum, layout


@dataclass(frozen=True)
class HostSums:
    """The entries on the host, in the order of the layout: totals, maxima, and the counts of the histogram."""

    layout: Layout
    entries: tuple[Any, ...]

    def value(self, row: Sum, label: str = "") -> Any:
        """The entry of a row, for one member of its family: a float, or the counts of a histogram."""
        return self.entries[self.layout.place(row, label)]

    @property
    def numbers(self) -> dict[str, float]:
        """The totals and maxima by name."""
        return dict(zip(self.layout.totals + self.layout.maxima, self.entries, strict=False))


@dataclass(frozen=True)
class Sums:
    """The additive statistics of a batch, on its device, in the order that `layout` gives.

    `totals` and `maxima`: float64, one entry for each name of `layout.totals` and `layout.maxima`. `counts`: int64,
    tokens by l in the bins of histogram.py. Two `Sums` add if they come from configurations with the same statistics.
    """

    layout: Layout
    totals: Tensor
    maxima: Tensor
    counts: Tensor

    @classmethod
    def of(cls, layout: Layout, values: Mapping[Sum, Tensor]) -> Sums:
        """From a tensor for each row of the table that has entries: one value for each member of its family.

        Joins them without a host copy. Raises KeyError for a row that is missing.
        """

        def joined(kind: Kind) -> Tensor:
            return torch.hstack([values[row] for row in layout.rows(kind)]).double()

        return cls(layout, joined(Kind.TOTAL), joined(Kind.MAXIMUM), values[LOG_RATIOS])

    @classmethod
    def zero(cls, config: RolloutCorrConfig) -> Sums:
        """The neutral element for batches corrected with `config`, on the CPU: the sums of an empty batch."""
        entries = layout(config)
        return cls(
            entries,
            torch.zeros(len(entries.totals), dtype=torch.float64),
            torch.full((len(entries.maxima),), -torch.inf, dtype=torch.float64),
            torch.zeros(COUNT, dtype=torch.int64),
        )

    def __repr__(self) -> str:
        # Printing the values would wait for the device.
        return f"Sums({len(self.layout.totals)} totals, {len(self.layout.maxima)} maxima; finalize gives the metrics)"

    def __add__(self, other: object) -> Sums:
        if not isinstance(other, Sums):
            return NotImplemented
        if self.layout != other.layout:
            names, others = ({*entries.totals, *entries.maxima} for entries in (self.layout, other.layout))
            raise InputError(
                "sums of different configurations do not add: only one side has "
                f"{', '.join(sorted(names ^ others)) or 'this order'}; correct every part of a batch with the same "
                "configuration"
            )
        device = self.totals.device
        return Sums(
            self.layout,
            self.totals + other.totals.to(device),
            torch.maximum(self.maxima, other.maxima.to(device)),
            self.counts + other.counts.to(device),
        )

    def __radd__(self, other: object) -> Sums:
        return self if other == 0 else NotImplemented  # sum() starts with 0

    def to(self, device: torch.device | str) -> Sums:
        """The same sums on another device."""
        return Sums(self.layout, self.totals.to(device), self.maxima.to(device), self.counts.to(device))

    def __reduce__(self) -> tuple[Callable[[Layout, Tensor], Sums], tuple[Layout, Tensor]]:
        # Pickled sums live on the CPU: the receiving process may have no such device. There is one copy to the host:
        # the bits of each float64 travel as an int64, in the same tensor as the counts.
        parts = [self.totals.view(torch.int64), self.maxima.view(torch.int64), self.counts]
        return _from_bits, (self.layout, torch.cat(parts).cpu())

    def to_host(self) -> HostSums:
        """Every entry, with one host copy."""
        if self.totals.device.type == "cpu":
            found = (cast(Any, part).tolist() for part in (self.totals, self.maxima, self.counts))
            totals, maxima, counts = found
            return HostSums(self.layout, (*totals, *maxima, tuple(counts)))
        # Counts below 2^53 stay exact.
        joined = torch.cat([self.totals, self.maxima, self.counts.double()]).cpu()
        first = len(self.totals) + len(self.maxima)
        numbers, counts = (cast(Any, part).tolist() for part in (joined[:first], joined[first:].long()))
        return HostSums(self.layout, (*numbers, tuple(counts)))


def _from_bits(layout: Layout, bits: Tensor) -> Sums:
    totals, maxima = len(layout.totals), len(layout.totals) + len(layout.maxima)
    values, counts = bits[:maxima].view(torch.float64), bits[maxima:]
    return Sums(layout, values[:totals].clone(), values[totals:].clone(), counts.clone())
