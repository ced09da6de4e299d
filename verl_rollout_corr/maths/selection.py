"""Which tokens leave a batch so that the mean of the rest is within a bound.

In the order of their values, the tokens that leave are the first ones, up to a cut. To spare sorting all tokens, they
are counted and added up in buckets, and only the bucket with the cut is sorted. Counts and sums add, so the tokens may
come in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_SHIFT = 48  # the bits of a float64 that its bucket ignores
_BUCKETS = 1 << (63 - _SHIFT)

Fits = Callable[[Tensor, Tensor], Tensor]
"""From totals and counts, of the same shape, to bool: whether the mean is within the bound."""


@dataclass(frozen=True)
class Candidates:
    """Some tokens of the batch, all tensors of one shape.

    `values`: the statistic, float64; 0 where the token does not count in the mean. `counts`: bool, where it does.
    `may_leave`: bool, some of those that count.
    """

    values: Tensor
    counts: Tensor
    may_leave: Tensor


def leaving(parts: Sequence[Candidates], limit: float, fits: Fits, *, may_wait: bool) -> list[Tensor]:
    """For each part, bool: the tokens that leave, largest value first, until the mean of the rest fits.

    `fits` says whether a mean is at most `limit`. Equal values leave in the order of the parts, then of the tokens. If
    no rest fits, all leave that may. Where waiting for the device is not allowed, there is one part, sorted whole.
    """
    if may_wait and bool(fits(_add(part.values for part in parts), _add(part.counts for part in parts))):
        return [torch.zeros_like(part.counts) for part in parts]
    # A token that is not above the limit only lowers the mean. So if those, with the tokens that must stay, do not fit
    # alone, nothing does. Otherwise the mean grows with every larger token that stays, and crosses the limit once.
    above = [part.may_leave & (part.values > limit) for part in parts]
    pairs = list(zip(parts, above, strict=True))
    total = _add(torch.where(high, 0.0, part.values) for part, high in pairs)
    count = _add(part.counts & ~high for part, high in pairs)
    possible = fits(total, count)
    if not may_wait:
        ((part, high),) = pairs
        leaves = _first(part.values.flatten(), high.flatten(), total, count, fits).view_as(high)
        return [torch.where(possible, leaves, part.may_leave)]
    if not bool(possible):
        return [part.may_leave for part in parts]
    cut, total, count = _bucket_of_the_cut(pairs, limit, total, count, fits)
    leaves, in_cut = list[Tensor](), list[Tensor]()
    for part, high in pairs:
        bucket = _bucket(part.values, limit)
        leaves.append(high & (bucket > cut))
        in_cut.append(high & (bucket == cut))
    values = [part.values[here] for part, here in zip(parts, in_cut, strict=True)]
    together = torch.cat(values)
    first = _first(together, torch.ones_like(together, dtype=torch.bool), total, count, fits)
    start = 0
    for found, here, some in zip(leaves, in_cut, values, strict=True):
        found[here] = first[start : start + len(some)]
        start += len(some)
    return leaves


def _bucket_of_the_cut(
    pairs: Sequence[tuple[Candidates, Tensor]], limit: float, total: Tensor, count: Tensor, fits: Fits
) -> tuple[int, Tensor, Tensor]:
    """The first bucket that may not stay whole, and the total and the count of what stays without it.

    `total` and `count` are without any bucket.
    """
    totals = torch.zeros(_BUCKETS, dtype=torch.float64, device=total.device)
    counts = torch.zeros(_BUCKETS, dtype=torch.int64, device=total.device)
    for part, high in pairs:
        bucket = _bucket(part.values, limit).flatten()
        totals.scatter_add_(0, bucket, torch.where(high, part.values, 0.0).flatten())
        counts.scatter_add_(0, bucket, high.long().flatten())
    totals, counts = torch.cat([total[None], totals]).cumsum(0), torch.cat([count[None], counts]).cumsum(0)
    cut = int(fits(totals[1:], counts[1:]).long().cumprod(0).sum())
    return cut, totals[cut], counts[cut]


def _bucket(values: Tensor, limit: float) -> Tensor:
    """The leading bits of the distance from the limit: of two values above it, the larger one has no smaller bits.

    Values below it, which are not counted, get a bucket too. One for all of them would take longer: an addition waits
    for the one before if it is to the same bucket.
    """
    return (values - limit).abs_().view(torch.int64) >> _SHIFT


def _first(values: Tensor, may_leave: Tensor, total: Tensor, count: Tensor, fits: Fits) -> Tensor:
    """(N,) bool: the tokens that leave, largest value first. `total` and `count`: without any that may leave."""
    ordered, order = torch.where(may_leave, values, -torch.inf).sort(descending=True, stable=True)
    listed = ordered != -torch.inf
    # What stays if the tokens before one leave, and that one does not.
    totals = torch.where(listed, ordered, 0.0).flip(0).cumsum(0).flip(0) + total
    counts = listed.long().flip(0).cumsum(0).flip(0) + count
    gone = (~fits(totals, counts)).long().cumprod(0) > 0
    return torch.zeros_like(may_leave).scatter(0, order, gone & listed)


def _add(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([tensor.sum() for tensor in tensors]).sum()
