"""The histogram of l: which bin, which edges, and quantiles that no split changes."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_rollout_corr import correct, finalize
from verl_rollout_corr.maths.histogram import CENTRE, COUNT, SIDE, abs_quantile, counts_by_bin, edge, quantile

PERCENT = (1, 50, 99)


def index_of(value: float) -> int:
    (found,) = counts_by_bin(torch.tensor([value], dtype=torch.float64), torch.tensor([1])).nonzero().tolist()
    return found[0]


def expected(value: float) -> int:
    """Counted in edges 2^k (1 + j/8), k from -19 to 4, and 2^5."""
    edges = [math.ldexp(1 + j / 8, k) for k in range(-19, 5) for j in range(8)] + [32.0]
    if value == -math.inf:
        return 0
    return CENTRE + int(math.copysign(1, value)) * sum(abs(value) >= e for e in edges)


def test_edges() -> None:
    """24 octaves of 8 bins on each side, and their ends."""
    assert (SIDE, CENTRE, COUNT) == (192, 194, 388)
    assert [edge(reached) for reached in (1, 2, 9, SIDE + 1)] == [2.0**-19, 1.125 * 2**-19, 2.0**-18, 32.0]


@given(st.one_of(st.floats(-40, 40), st.floats(-1e-4, 1e-4), st.sampled_from([-math.inf, 1e300, -1e300, 5e-324, 0.0])))
def test_the_bin_of_any_number(value: float) -> None:
    """Read off the bits, as counted in edges."""
    assert index_of(value) == expected(value)


@pytest.mark.parametrize("reached", range(1, SIDE + 2))
def test_an_edge_belongs_to_the_bin_farther_from_0(reached: int) -> None:
    """On both sides; the next float64 below it does not."""
    at = edge(reached)
    below = math.nextafter(at, 0) if hasattr(math, "nextafter") else float(np.nextafter(at, 0))
    assert (index_of(at), index_of(-at)) == (CENTRE + reached, CENTRE - reached)
    assert (index_of(below), index_of(-below)) == (CENTRE + reached - 1, CENTRE - reached + 1)


def counts_of(values: list[float]) -> list[int]:
    found = Counter(map(index_of, values))
    return [found[i] for i in range(COUNT)]


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=60), st.sampled_from([1, 50, 90, 99]))
def test_quantiles_are_within_an_eighth(values: list[float], percent: int) -> None:
    """Of a value with so many percent of the values below or at it (the ceil(q n)-th smallest)."""
    rank = max(-(-percent * len(values) // 100), 1) - 1
    for found, exact in (
        (quantile(counts_of(values), percent), sorted(values)[rank]),
        (abs_quantile(counts_of(values), percent), sorted(map(abs, values))[rank]),
    ):
        assert abs(found - exact) <= max(abs(exact) / 8, 2.0**-19)


def test_quantiles_by_hand() -> None:
    """Ten values in the bin from 1 to 1.125 and ninety at 0: interpolated within the bin, 0 in the centre."""
    counts = counts_of([0.0] * 90 + [1.05] * 10)
    assert quantile(counts, 50) == 0.0
    assert quantile(counts, 99) == 1 + 0.125 * 0.9
    assert abs_quantile(counts, 90) == 0.0
    assert quantile([0] * COUNT, 50) == abs_quantile([0] * COUNT, 50) == 0.0
    assert (quantile(counts_of([-50.0]), 50), quantile(counts_of([50.0]), 50)) == (-32.0, 32.0)
    assert (quantile(counts_of([-math.inf]), 1), abs_quantile(counts_of([-math.inf]), 99)) == (-math.inf, math.inf)


def test_one_outlier_rules_the_mean_and_not_the_quantiles() -> None:
    """A thousand tokens of |l| about 1e-3 and one of -25: metrics, in one piece and in two."""
    generator = torch.Generator().manual_seed(3)
    rollout = torch.full((1, 1000), -2.0, dtype=torch.float64)
    train = rollout + 1e-3 * torch.randn(1, 1000, generator=generator, dtype=torch.float64)
    train[0, 7] = -27.0
    found = correct(train, rollout, torch.ones(1, 1000), {}).metrics
    l = (train - rollout)[0].sort().values  # noqa: E741
    for percent in PERCENT:
        assert found[f"rollout_corr/log_ratio_p{percent:02d}"] == pytest.approx(float(l[percent * 10 - 1]), rel=0.13)
    assert found["rollout_corr/abs_log_ratio_p99"] < 0.004
    parts = [correct(train[:, a:b], rollout[:, a:b], torch.ones(1, b - a), {}).sums for a, b in ((0, 300), (300, 1000))]
    again = finalize(parts[0] + parts[1])
    quantiles = [name for name in found if "log_ratio_p" in name]
    assert len(quantiles) == 6
    assert [again[name] for name in quantiles] == [found[name] for name in quantiles]
