"""Which tokens leave a batch so that the mean of the rest is within a bound.

In the order of their values, the tokens that leave are the first ones, up to a cut. Of tokens that are not above the
bound only the sum matters. To spare sorting all others, they are counted and added up in buckets, and only the bucket
with the cut is sorted. Counts and sums add, so the tokens may come in parts.
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


@dataclass(frozen=True)
class Listed:
    """What is kept of candidates: a value only of those that may leave and are above the limit.

    `may_leave` and `above`: bool, in the shape of the candidates. `values`: (K,), of those above. `total` and `count`:
    of all that count in the mean; `rest`: the total of those that are not above.
    """

    may_leave: Tensor
    above: Tensor
    values: Tensor
    total: Tensor
    count: Tensor
    rest: Tensor


def listed(part: Candidates, limit: float) -> Listed:
    """Waits for the device."""
    above = part.may_leave & (part.values > limit)
    rest = torch.where(above, 0.0, part.values).sum()
    return Listed(part.may_leave, above, part.values[above], part.values.sum(), part.counts.sum(), rest)


def leaving(parts: Sequence[Listed], limit: float, fits: Fits) -> list[Tensor]:
    """For each part, bool: the tokens that leave, largest value first, until the mean of the rest fits.

    `fits` says whether a mean is at most `limit`. Equal values leave in the order of the parts, then of the tokens. If
    no rest fits, all leave that may.
    """
    count = _add(part.count for part in parts)
    if bool(fits(_add(part.total for part in parts), count)):
        return [torch.zeros_like(part.above) for part in parts]
    # A token that is not above the limit only lowers the mean. So if those, with the tokens that must stay, do not fit
    # alone, nothing does. Otherwise the mean grows with every larger token that stays, and crosses the limit once.
    total, count = _add(part.rest for part in parts), count - sum(len(part.values) for part in parts)
    if not bool(fits(total, count)):
        return [part.may_leave for part in parts]
    cut, total, count = _bucket_of_the_cut([part.values for part in parts], limit, total, count, fits)
    leaves = [_bucket(part.values, limit) > cut for part in parts]
    in_cut = [_bucket(part.values, limit) == cut for part in parts]
    first = _first(torch.cat([part.values[here] for part, here in zip(parts, in_cut, strict=True)]), total, count, fits)
    found, start = list[Tensor](), 0
    for part, gone, here in zip(parts, leaves, in_cut, strict=True):
        end = start + int(here.sum())
        gone[here] = first[start:end]
        found.append(torch.zeros_like(part.above).masked_scatter_(part.above, gone))
        start = end
    return found


def leaving_at_once(whole: Candidates, limit: float, fits: Fits) -> Tensor:
    """The same of all tokens of the batch, by sorting them. It does not wait for the device."""
    above = whole.may_leave & (whole.values > limit)
    total, count = torch.where(above, 0.0, whole.values).sum(), (whole.counts & ~above).sum()
    ordered = torch.where(above, whole.values, -torch.inf).flatten()
    leaves = _first(ordered, total, count, fits).view_as(above)
    return torch.where(fits(total, count), above & leaves, whole.may_leave)


def _bucket_of_the_cut(
    parts: Sequence[Tensor], limit: float, total: Tensor, count: Tensor, fits: Fits
) -> tuple[int, Tensor, Tensor]:
    """The first bucket that may not stay whole, and the total and the count of what stays without it.

    `total` and `count` are without any bucket.
    """
    totals = torch.zeros(_BUCKETS, dtype=torch.float64, device=total.device)
    counts = torch.zeros(_BUCKETS, dtype=torch.int64, device=total.device)
    for values in parts:
        bucket = _bucket(values, limit)
        totals.scatter_add_(0, bucket, values)
        counts.scatter_add_(0, bucket, torch.ones_like(bucket))
    totals, counts = torch.cat([total[None], totals]).cumsum(0), torch.cat([count[None], counts]).cumsum(0)
    cut = int(fits(totals[1:], counts[1:]).long().cumprod(0).sum())
    return cut, totals[cut], counts[cut]


def _bucket(values: Tensor, limit: float) -> Tensor:
    """The leading bits of the distance from the limit: of two values above it, the larger one has no smaller bits."""
    return (values - limit).view(torch.int64) >> _SHIFT


def _first(values: Tensor, total: Tensor, count: Tensor, fits: Fits) -> Tensor:
    """(N,) bool: the tokens that leave, largest value first; -inf is none. `total` and `count`: without any of them."""
    ordered, order = values.sort(descending=True, stable=True)
    exists = ordered != -torch.inf
    # What stays if the tokens before one leave, and that one does not.
    totals = torch.where(exists, ordered, 0.0).flip(0).cumsum(0).flip(0) + total
    counts = exists.long().flip(0).cumsum(0).flip(0) + count
    gone = (~fits(totals, counts)).long().cumprod(0) > 0
    return torch.zeros_like(gone).scatter(0, order, gone)


def _add(scalars: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(scalars)).sum()
