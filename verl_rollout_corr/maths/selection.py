"""Which tokens leave a batch so that the mean of the rest is within a bound: found by counting, without a sort.

The cut lies at one value. Its 64 bits are found 16 at a time: tokens are counted and added up in 65,536 buckets by the
next 16 bits, and sums over the buckets say in which of them the mean crosses the bound. That is four passes over the
tokens. Counts and sums add, so the tokens may come in parts. Shapes are fixed: nothing synchronises with the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_DIGIT_BITS = 16
_BUCKETS = 1 << _DIGIT_BITS
_LARGEST = (1 << 63) - 1

Fits = Callable[[Tensor, Tensor], Tensor]
"""From totals and counts, of the same shape, to bool: whether the mean is within the bound."""


@dataclass(frozen=True)
class Candidates:
    """Some tokens of the batch, all tensors of one shape.

    `values`: the statistic, float64; -inf where the token does not count in the mean. `may_leave`: bool.
    """

    values: Tensor
    may_leave: Tensor


def leaving(parts: Sequence[Candidates], limit: float, fits: Fits) -> list[Tensor]:
    """For each part, bool: the tokens that leave, largest value first, until the mean of the rest fits.

    `fits` says whether a mean is at most `limit`. Equal values leave in the order of the parts, then of the tokens. If
    no rest fits, all leave that may.
    """
    may_leave = [part.may_leave & (part.values != -torch.inf) for part in parts]
    # A token that is not above the limit only lowers the mean. So if those, with the tokens that must stay, do not fit
    # alone, nothing does. Otherwise the mean grows with every larger token that stays, and crosses the limit once.
    at = [may & (part.values > limit) for part, may in zip(parts, may_leave, strict=True)]
    stays = [(part.values != -torch.inf) & ~above for part, above in zip(parts, at, strict=True)]
    total = _add(torch.where(stay, part.values, 0.0).sum() for part, stay in zip(parts, stays, strict=True))
    count = _add(stay.sum() for stay in stays)
    possible = fits(total, count)
    leaves, ties = [torch.zeros_like(above) for above in at], count
    for shift in range(64 - _DIGIT_BITS, -1, -_DIGIT_BITS):
        counts = torch.zeros(_BUCKETS, dtype=torch.int64, device=count.device)
        totals = torch.zeros(_BUCKETS, dtype=torch.float64, device=count.device)
        for part, here in zip(parts, at, strict=True):
            digit = _digit(part.values, shift).flatten()
            counts.scatter_add_(0, digit, here.long().flatten())
            totals.scatter_add_(0, digit, torch.where(here, part.values, 0.0).flatten())
        # What stays if the cut is below each bucket, and in the end below none of them.
        up_to_total = torch.cat([total[None], totals.cumsum(0) + total])
        up_to_count = torch.cat([count[None], counts.cumsum(0) + count])
        cut = fits(up_to_total[1:], up_to_count[1:]).long().cumprod(0).sum()[None]
        total, count = up_to_total.gather(0, cut)[0], up_to_count.gather(0, cut)[0]
        ties = torch.nn.functional.pad(counts, (0, 1)).gather(0, cut)[0]
        for index, part in enumerate(parts):
            digit = _digit(part.values, shift)
            leaves[index] |= at[index] & (digit > cut)
            at[index] &= digit == cut
    # Tokens that are still in `at` have the value of the cut. Each leaves if it and the later ones may not all stay.
    for index, part in enumerate(parts):
        rank = at[index].flatten().cumsum(0).view_as(part.values)
        staying = ties - rank + 1
        leaves[index] |= at[index] & ~fits(total + part.values * staying, count + staying)
        leaves[index] = torch.where(possible, leaves[index], may_leave[index])
        ties = ties - at[index].sum()
    return leaves


def _digit(values: Tensor, shift: int) -> Tensor:
    """16 bits of each float64, which taken together from the highest on are ordered as the values are."""
    bits = values.view(torch.int64)
    ordered = bits ^ ((bits >> 63) & _LARGEST)  # of two negative numbers the one with larger bits is smaller
    top = _BUCKETS >> 1 if shift == 64 - _DIGIT_BITS else 0  # and every negative one is below the others
    return ((ordered >> shift) & (_BUCKETS - 1)) ^ top


def _add(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).sum()
