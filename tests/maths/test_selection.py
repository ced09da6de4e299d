"""Which tokens leave so that the mean of the rest is within a bound, beside a loop that takes one after the other."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from verl_rollout_corr.maths.selection import Candidates, leaving, leaving_at_once, listed


def one_by_one(values: list[float], may_leave: list[bool], limit: float) -> list[bool]:
    """The definition in words, in Python: largest first, ties in order, until the mean of the rest fits."""
    counted = [value != -math.inf for value in values]
    order = sorted((i for i, may in enumerate(may_leave) if may and counted[i]), key=lambda i: (-values[i], i))
    gone: set[int] = set()
    for index in order:
        rest = [value for i, value in enumerate(values) if counted[i] and i not in gone]
        if math.fsum(rest) / len(rest) <= limit:
            break
        gone.add(index)
    return [i in gone for i in range(len(values))]


def parts_of(values: Tensor, may_leave: Tensor, cut: int = 0) -> list[Candidates]:
    """One part, or two. A value of -inf stands for a token that does not count."""
    counts = values != -math.inf
    whole = Candidates(torch.where(counts, values, 0.0), counts, counts & may_leave)
    if not cut:
        return [whole]
    sides = (slice(cut), slice(cut, None))
    return [Candidates(whole.values[at], whole.counts[at], whole.may_leave[at]) for at in sides]


def found(values: Tensor, may_leave: Tensor, limit: float, cut: int = 0) -> list[bool]:
    """What leaves, the same if the device may not be waited for."""
    parts = [listed(part, limit) for part in parts_of(values, may_leave, cut)]
    leaves = torch.cat(leaving(parts, limit, fits(limit)))
    (whole,) = parts_of(values, may_leave)
    assert torch.equal(leaves, leaving_at_once(whole, limit, fits(limit)))
    return leaves.tolist()


def fits(limit: float):
    """Whether a mean is at most the limit."""

    def within(total: Tensor, count: Tensor) -> Tensor:
        return total / count.clamp(min=1) <= limit

    return within


def kinds(kind: str, generator: torch.Generator, count: int) -> Tensor:
    """Small whole numbers, so that there are ties and sums are exact; some infinite, some that do not count."""
    values = torch.randint(-3, 9, (count,), generator=generator).double() / 4
    values = values.abs() if kind != "signed" else values
    if kind == "infinite":
        values[torch.rand(count, generator=generator) < 0.2] = math.inf
    values[torch.rand(count, generator=generator) < 0.2] = -math.inf
    return values


def test_of_two_negative_values_the_nearer_to_zero_leaves_first() -> None:
    values = torch.tensor([-0.1, -0.3, -0.2, -1.0], dtype=torch.float64)
    assert found(values, torch.ones(4, dtype=torch.bool), -0.45) == [True, False, False, False]


@pytest.mark.parametrize("kind", ["positive", "signed", "infinite"])
def test_as_one_by_one(kind: str) -> None:
    """On random tokens in two parts, whatever may leave."""
    generator = torch.Generator().manual_seed(7)
    for round_ in range(60):
        count = 1 + round_ % 17
        values = kinds(kind, generator, count)
        may_leave = torch.rand(count, generator=generator) < 0.7
        limit = float(torch.randint(-2 if kind == "signed" else 1, 5, (1,), generator=generator)) / 4
        cut = round_ % (count + 1)
        leaves = found(values, may_leave, limit, cut)
        assert leaves == one_by_one(values.tolist(), may_leave.tolist(), limit), (values, may_leave, limit)


def test_values_that_differ_in_their_last_bit_are_told_apart() -> None:
    """All 64 bits of a value are looked at, of negative ones too."""
    for at in (0.3, 5.0, 1e-300):
        above = math.nextafter(at, math.inf) if hasattr(math, "nextafter") else at * (1 + 2**-52)
        values = torch.tensor([at, above, at, above, 0.0], dtype=torch.float64)
        limit = (2 * at + above) / 4
        assert found(values, torch.ones(5, dtype=torch.bool), limit) == [False, True, False, False, False]


def test_nothing_of_nothing() -> None:
    """No tokens, and none that may leave."""
    nothing = torch.zeros(0, dtype=torch.float64)
    assert found(nothing, nothing.bool(), 1.0) == []
    ones = torch.ones(4, dtype=torch.float64)
    assert found(ones, torch.zeros(4, dtype=torch.bool), 0.5) == [False] * 4


def test_a_bucket_across_parts() -> None:
    """Values that share their bucket, in several parts: larger ones first, equal ones in order."""
    generator = torch.Generator().manual_seed(3)
    values = 1 + torch.randint(0, 9, (40,), generator=generator).double() * 2**-20
    values = torch.cat([values, torch.full((5,), 2.0, dtype=torch.float64), torch.zeros(45, dtype=torch.float64)])
    may_leave = torch.rand(90, generator=generator) < 0.9
    for limit in (0.1, 0.3, 0.44, 0.5):
        assert found(values, may_leave, limit, 23) == one_by_one(values.tolist(), may_leave.tolist(), limit)
