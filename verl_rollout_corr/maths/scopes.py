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

ALL_ROWS = slice(None)
"""The rows of a whole batch."""


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
        if self.lengths is None:
            return padded
        return self.joined(padded[inside(self.lengths)])

    def blank(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """Zeros for `put` and `joined`: (B, T), or for jagged rows their tokens, (N,). `mask` is in this layout."""
        return torch.zeros_like(mask.values() if mask.is_nested else mask, dtype=dtype)

    def put(self, result: Tensor, rows: slice, part: Tensor) -> None:
        """Writes the padded result of some rows, of which it may leave out the last columns, into the whole one."""
        if self.offsets is None or self.lengths is None:
            result[rows, : part.shape[1]] = part
            return
        within = inside(self.lengths[rows])
        part = torch.nn.functional.pad(part, (0, within.shape[1] - part.shape[1]))
        result[_tokens_of(self.offsets, rows)] = part[within].to(result.dtype)

    def joined(self, result: Tensor) -> Tensor:
        """What `put` has filled, in the layout of the input."""
        if self.offsets is None or self.lengths is None:
            return result
        # Without the longest row's length, torch pads the answer to the length of all rows together.
        longest = int(self.lengths.max()) if len(self.lengths) else 0
        return torch.nested.nested_tensor_from_jagged(result, self.offsets, max_seqlen=longest)


def row_offsets(jagged: Tensor) -> Tensor:
    """(B + 1,) where each row of a jagged tensor starts, and where the last one ends."""
    return cast(Any, jagged).offsets()  # torch's stubs do not know nested tensors


def inside(lengths: Tensor) -> Tensor:
    """(B, T) bool, T the longest of rows of these lengths: where a padded row has a token."""
    longest = int(lengths.max()) if len(lengths) else 0
    return torch.arange(longest, device=lengths.device) < lengths[:, None]


def to_padded(tensor: Tensor, *, padding: float = 0.0, rows: slice = ALL_ROWS) -> Tensor:
    """(B, T) of a jagged or padded tensor, or of some of its rows; then T is the longest of these if it is jagged."""
    if not tensor.is_nested:
        return tensor if rows == ALL_ROWS else tensor[rows]
    offsets = row_offsets(tensor)
    within = inside(offsets.diff()[rows])
    padded = torch.full(within.shape, padding, dtype=tensor.dtype, device=within.device)
    padded[within] = tensor.values()[_tokens_of(offsets, rows)]
    return padded


def _tokens_of(offsets: Tensor, rows: slice) -> slice:
    """The tokens of some rows among those of all rows."""
    first, end, _ = rows.indices(len(offsets) - 1)
    return slice(int(offsets[first]), int(offsets[end]))


def layout_of(tensor: Tensor) -> Layout:
    """The layout in which `tensor` is given."""
    if not tensor.is_nested:
        return Layout(None, None)
    offsets = row_offsets(tensor)
    return Layout(offsets, offsets.diff())
