"""Which tokens leave so that the mean of the rest is within a bound, beside a loop that takes one after the other."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from verl_rollout_corr.maths.selection import Candidates, leaving


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
    (found,) = leaving([Candidates(values, torch.ones(4, dtype=torch.bool))], -0.45, fits(-0.45))
    assert found.tolist() == [True, False, False, False]


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
        parts = [Candidates(values[:cut], may_leave[:cut]), Candidates(values[cut:], may_leave[cut:])]
        found = torch.cat(leaving(parts, limit, fits(limit))).tolist()
        assert found == one_by_one(values.tolist(), may_leave.tolist(), limit), (values, may_leave, limit)


def test_values_that_differ_in_their_last_bit_are_told_apart() -> None:
    """All 64 bits of a value are looked at, of negative ones too."""
    for at in (0.3, 5.0, 1e-300):
        above = math.nextafter(at, math.inf) if hasattr(math, "nextafter") else at * (1 + 2**-52)
        values = torch.tensor([at, above, at, above, 0.0], dtype=torch.float64)
        limit = (2 * at + above) / 4
        found = leaving([Candidates(values, torch.ones(5, dtype=torch.bool))], limit, fits(limit))[0]
        assert found.tolist() == [False, True, False, False, False]


def test_nothing_of_nothing() -> None:
    """No tokens, and none that may leave."""
    empty = torch.zeros(0, 3, dtype=torch.float64)
    assert leaving([Candidates(empty, empty.bool())], 1.0, fits(1.0))[0].shape == (0, 3)
    ones = torch.ones(2, 2, dtype=torch.float64)
    assert not leaving([Candidates(ones, torch.zeros_like(ones).bool())], 0.5, fits(0.5))[0].any()
