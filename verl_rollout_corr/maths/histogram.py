"""A histogram of the log-ratio: counts that add exactly, and quantiles of them.

One token can dominate a mean of l or of k3, but not the quantiles. The bins are octaves of |l| from 2^-19 to 2^5, each
cut into 8 bins of equal width (as HdrHistogram does), on both sides of a centre that holds |l| < 2^-19. Every edge is
exact in a float64, so the bin follows from the bits of l, and every implementation finds the same one.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from operator import add

import torch
from torch import Tensor

_SUB_BITS = 3
_LOW_EXPONENT, _HIGH_EXPONENT = -19, 5

SIDE = (_HIGH_EXPONENT - _LOW_EXPONENT) << _SUB_BITS
"""Bins between 2^-19 and 2^5 on one side."""

CENTRE = SIDE + 2
"""The bin of |l| < 2^-19."""

COUNT = 2 * SIDE + 4
"""Bins in all. From below: l = -inf; l <= -32; SIDE bins up to -2^-19; the centre; SIDE bins up to 32; l >= 32."""

_SHIFT = 52 - _SUB_BITS
_FIRST = (1023 + _LOW_EXPONENT) << _SUB_BITS
_INFINITE = 0x7FF << _SUB_BITS
_PATTERNS = 0x800 << _SUB_BITS


def counts_by_bin(log_ratio: Tensor, number: Tensor) -> Tensor:
    """(COUNT,) int64: how many log-ratios are in each bin, where each (float64) stands for so many as `number` (int64).

    A log-ratio on an edge is in the bin farther from 0.
    """
    # The exponent and the leading bits of the mantissa, read as one integer, grow with |l|. From the first edge to the
    # last, there is a bin for each of these patterns. They are counted for both signs, and those beyond are joined.
    pattern = (log_ratio.view(torch.int64) >> _SHIFT).bitwise_and_(2 * _PATTERNS - 1)
    counts = torch.zeros(2 * _PATTERNS, dtype=torch.int64, device=log_ratio.device)
    counts = counts.scatter_add_(0, pattern.flatten(), number.flatten()).view(2, _PATTERNS)
    last = _FIRST + SIDE
    centre, beyond = counts[:, :_FIRST].sum(), counts[:, last:_INFINITE].sum(dim=1)
    (above, below), (far_above, far_below) = counts[:, _FIRST:last], beyond[:, None]
    return torch.cat([counts[1, _INFINITE, None], far_below, below.flip(0), centre[None], above, far_above])


def edge(reached: int) -> float:
    """The smallest |l| that has reached so many edges, 1 to SIDE + 1."""
    octave, part = divmod(reached - 1, 1 << _SUB_BITS)
    return math.ldexp(1 + part / (1 << _SUB_BITS), _LOW_EXPONENT + octave)


def quantile(counts: Sequence[int], percent: int) -> float:
    """The l below which so many percent of the tokens lie, interpolated within a bin at most an eighth of |l| wide.

    It is 0 in the centre bin (|l| < 1.9e-6), -32 or 32 for anything beyond these, and 0 if there are no tokens.
    """
    return _quantile(_ENDS, _cumulated(tuple(counts)), percent)


def abs_quantile(counts: Sequence[int], percent: int) -> float:
    """The same quantile of |l|, which is +inf for a token of probability 0 under pi_train."""
    return _quantile(_ABS_ENDS, _folded(tuple(counts)), percent)


def _ends() -> tuple[tuple[float, float], ...]:
    """Both ends of every bin but that of -inf, from below."""
    above = [(edge(reached), edge(min(reached + 1, SIDE + 1))) for reached in range(1, SIDE + 2)]
    return (*((-far, -near) for near, far in reversed(above)), (0.0, 0.0), *above)


_ENDS = ((-math.inf, -math.inf), *_ends())
_ABS_ENDS = (*_ends()[CENTRE - 1 :], (math.inf, math.inf))


@lru_cache(maxsize=1)
def _cumulated(counts: tuple[int, ...]) -> list[int]:
    """Cumulative counts, lowest bin first; cached, since several quantiles of the same batch are computed in turn."""
    return list(accumulate(counts))


@lru_cache(maxsize=1)
def _folded(counts: tuple[int, ...]) -> list[int]:
    """Cumulative counts by |l|, smallest first; l = -inf comes last."""
    below, above = counts[CENTRE - 1 : 0 : -1], counts[CENTRE + 1 :]
    return list(accumulate((counts[CENTRE], *map(add, below, above), counts[0])))


def _quantile(ends: Sequence[tuple[float, float]], up_to: list[int], percent: int) -> float:
    if not up_to[-1]:
        return 0.0
    # In integers, because a rounded 0.99 * n can choose one bin for a batch and another for the same batch twice.
    wanted = percent * up_to[-1]
    at = bisect_left(up_to, -(-wanted // 100))
    (low, high), before = ends[at], up_to[at - 1] if at else 0
    return low if low == high else low + (high - low) * (wanted - 100 * before) / (100 * (up_to[at] - before))
