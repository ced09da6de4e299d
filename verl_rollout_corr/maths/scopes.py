"""Units: which tokens belong together, and how a per-token value becomes one value per unit.

The only file that knows about layouts. All maths works on padded (B, T) tensors; `to_padded` turns jagged tensors into
them, and `Layout` turns results back into the layout of the input.
Everything here has fixed shapes, so nothing synchronises with the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from verl_rollout_corr.grammar import Agg, Scope


class Units(Protocol):
    """The units of one scope in a padded batch: S slots in each row, of which some are units.

    `mask` (B, T) bool: response tokens. Values that are summed must be 0 outside the response. What `spread` returns
    there is meaningless.
    """

    mask: Tensor

    @cached_property
    def count(self) -> Tensor:
        """(B, S) float64: response tokens of each unit; a slot with 0 is not a unit."""
        return self.total(self.mask)

    @cached_property
    def exists(self) -> Tensor:
        """(B, S) bool: slots that are units."""
        return self.count > 0

    def tokens_in(self, units: Tensor) -> Tensor:
        """(B,): how many response tokens the units have for which (B, S) bool is True."""
        return torch.where(units, self.count, 0.0).sum(dim=1)

    def total(self, values: Tensor) -> Tensor:
        """(B, S) float64: sum over each unit of (B, T) values."""
        ...

    def maximum(self, values: Tensor) -> Tensor:
        """(B, S): maximum over each unit of (B, T) values, -inf where a slot is not a unit."""
        ...

    def spread(self, per_unit: Tensor) -> Tensor:
        """(B, T): gives each token the value of its unit."""
        ...


@dataclass(frozen=True)
class TokenUnits(Units):
    """Every response token is a unit."""

    mask: Tensor

    @cached_property
    def exists(self) -> Tensor:
        return self.mask

    def tokens_in(self, units: Tensor) -> Tensor:
        return (self.mask & units).sum(dim=1)

    def total(self, values: Tensor) -> Tensor:
        return values.double()

    def maximum(self, values: Tensor) -> Tensor:
        return torch.where(self.mask, values, -torch.inf)

    def spread(self, per_unit: Tensor) -> Tensor:
        return per_unit


@dataclass(frozen=True)
class SeqUnits(Units):
    """The response tokens of a row are a unit."""

    mask: Tensor

    def total(self, values: Tensor) -> Tensor:
        return values.sum(dim=1, keepdim=True).double()

    def maximum(self, values: Tensor) -> Tensor:
        if not values.shape[1]:
            return torch.full_like(self.count, -torch.inf)
        return torch.where(self.mask, values, -torch.inf).amax(dim=1, keepdim=True)

    def spread(self, per_unit: Tensor) -> Tensor:
        return per_unit.expand(self.mask.shape)


@dataclass(frozen=True)
class TurnUnits(Units):
    """Every maximal run of response tokens in a row is a unit; a row of T tokens has at most (T + 1) / 2 of them.

    `index` (B, T) int64: the slot of each token's turn. Outside the response it is that of a turn beside it.
    """

    mask: Tensor
    index: Tensor

    def total(self, values: Tensor) -> Tensor:
        return self._slots(0.0).scatter_add(1, self.index, values.double())

    def maximum(self, values: Tensor) -> Tensor:
        inside = torch.where(self.mask, values, -torch.inf)
        return self._slots(-torch.inf).scatter_reduce(1, self.index, inside, reduce="amax")

    def spread(self, per_unit: Tensor) -> Tensor:
        return per_unit.gather(1, self.index)

    def _slots(self, value: float) -> Tensor:
        rows, length = self.mask.shape
        return torch.full((rows, (length + 1) // 2), value, dtype=torch.float64, device=self.mask.device)


def turn_units(mask: Tensor) -> TurnUnits:
    """A turn is a maximal run of response tokens in a row."""
    before = torch.zeros_like(mask)
    before[:, 1:] = mask[:, :-1]
    number = torch.cumsum((mask & ~before).long(), dim=1) - 1
    return TurnUnits(mask, number.clamp(min=0))


def units_of(scope: Scope, mask: Tensor) -> Units:
    """The units of a scope; of the batch scope, its tokens. `mask` is (B, T) bool."""
    if scope is Scope.SEQ:
        return SeqUnits(mask)
    if scope is Scope.TURN:
        return turn_units(mask)
    return TokenUnits(mask)


def aggregate(values: Tensor, units: Units, agg: Agg | None) -> Tensor:
    """(B, S): sum, mean or maximum of a statistic over each unit's response tokens (`None`: the token's own value).

    The values are 0 outside the response. One -inf makes a sum and a mean -inf: a unit that holds a token of
    probability 0 has the product and the geometric mean 0, as in the limit of an ever smaller probability. +inf stays
    +inf.
    """
    if agg is None or agg is Agg.MAX:
        return units.maximum(values)
    total = units.total(values)
    return total if agg is Agg.SUM else total / units.count.clamp(min=1.0)


@dataclass(frozen=True)
class Layout:
    """The layout of the input: padded, or jagged with these offsets and lengths."""

    offsets: Tensor | None
    lengths: Tensor | None

    def answer(self, padded: Tensor) -> Tensor:
        """Turns a padded result into the layout of the input."""
        if self.offsets is None or self.lengths is None:
            return padded
        inside = torch.arange(padded.shape[1], device=padded.device) < self.lengths[:, None]
        # Without the longest row's length, torch pads the answer to the length of all rows together.
        return torch.nested.nested_tensor_from_jagged(padded[inside], self.offsets, max_seqlen=padded.shape[1])


def row_offsets(jagged: Tensor) -> Tensor:
    """(B + 1,) where each row of a jagged tensor starts, and where the last one ends."""
    return cast(Any, jagged).offsets()  # torch's stubs do not know nested tensors


def to_padded(tensor: Tensor, *, padding: float = 0.0) -> Tensor:
    """(B, T) of a jagged or padded tensor."""
    if not tensor.is_nested:
        return tensor
    lengths = row_offsets(tensor).diff()
    longest = int(lengths.max()) if len(lengths) else 0
    inside = torch.arange(longest, device=lengths.device) < lengths[:, None]
    padded = torch.full(inside.shape, padding, dtype=tensor.dtype, device=lengths.device)
    padded[inside] = tensor.values()
    return padded


def layout_of(tensor: Tensor) -> Layout:
    """The layout in which `tensor` is given."""
    if not tensor.is_nested:
        return Layout(None, None)
    offsets = row_offsets(tensor)
    return Layout(offsets, offsets.diff())
