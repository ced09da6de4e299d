"""Units: which tokens belong together, and how a per-token value becomes one value per unit.

The only file that knows layout. Padded (B, T) is the layout of all maths; `to_padded` turns jagged tensors into it, and
`Layout` answers in kind.
Everything here has fixed shapes, so nothing synchronises with the host: a row of T tokens has at most T turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from verl_rollout_corr.grammar import Agg, Scope


@dataclass(frozen=True)
class Units:
    """The units of one scope in a padded batch.

    `index` (B, T) int64: the slot of each token's unit in its row; tokens outside the response point at the last slot,
        which is no unit.
    `count` (B, S) float64: response tokens of each unit; a slot with 0 is no unit.
    """

    index: Tensor
    count: Tensor

    @property
    def exists(self) -> Tensor:
        """(B, S) bool: slots that are units."""
        return self.count > 0

    def total(self, values: Tensor) -> Tensor:
        """(B, S): sum over each unit of (B, T) values, which must be 0 outside the response."""
        zeros = torch.zeros_like(self.count)
        return zeros.scatter_add(1, self.index, values.to(zeros.dtype))

    def maximum(self, values: Tensor) -> Tensor:
        """(B, S): maximum over each unit, -inf where a slot is no unit."""
        start = torch.full_like(self.count, -torch.inf)
        return start.scatter_reduce(1, self.index, values.to(start.dtype), reduce="amax")

    def spread(self, per_unit: Tensor) -> Tensor:
        """(B, T): each token the value of its unit; what stands outside the response is meaningless."""
        return per_unit.gather(1, self.index)


def token_units(mask: Tensor) -> Units:
    """Every response token is a unit."""
    rows, length = mask.shape
    position = torch.arange(length, device=mask.device).expand(rows, length)
    index = torch.where(mask, position, length)
    return _units(index, mask, slots=length)


def turn_units(mask: Tensor) -> Units:
    """A turn is a maximal run of response tokens in a row."""
    before = torch.zeros_like(mask)
    before[:, 1:] = mask[:, :-1]
    number = torch.cumsum((mask & ~before).long(), dim=1) - 1
    return _units(torch.where(mask, number, mask.shape[1]), mask, slots=mask.shape[1])


def seq_units(mask: Tensor) -> Units:
    """The response tokens of a row."""
    return _units(torch.where(mask, 0, 1), mask, slots=1)


def _units(index: Tensor, mask: Tensor, *, slots: int) -> Units:
    count = torch.zeros((mask.shape[0], slots + 1), dtype=torch.float64, device=mask.device)
    count = count.scatter_add(1, index, mask.to(torch.float64))
    return Units(index=index, count=count)


def units_of(scope: Scope, mask: Tensor) -> Units:
    """The units of a scope; of the batch scope, its tokens. `mask` is (B, T) bool."""
    if scope is Scope.SEQ:
        return seq_units(mask)
    if scope is Scope.TURN:
        return turn_units(mask)
    return token_units(mask)


def aggregate(values: Tensor, units: Units, mask: Tensor, agg: Agg | None) -> Tensor:
    """(B, S): sum, mean or maximum of a statistic over each unit's response tokens (`None`: the token's own value).

    A mean of values that hold -inf leaves those tokens out (they have no log-ratio), and is -inf over nothing else;
    +inf stays +inf.
    """
    if agg is None or agg is Agg.MAX:
        return units.maximum(torch.where(mask, values, -torch.inf))
    inside = torch.where(mask, values, torch.zeros_like(values))
    if agg is Agg.SUM:
        return units.total(inside)
    finite = mask & (values != -torch.inf)
    count = units.total(finite.to(torch.float64))
    total = units.total(torch.where(finite, values, torch.zeros_like(values)))
    return torch.where(count > 0, total / count.clamp(min=1.0), torch.full_like(total, -torch.inf))


@dataclass(frozen=True)
class Layout:
    """How the question was asked: padded, or jagged with these offsets and lengths."""

    offsets: Tensor | None
    lengths: Tensor | None

    def answer(self, padded: Tensor) -> Tensor:
        """A padded result in the layout of the question."""
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
