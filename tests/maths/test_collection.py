"""Which sums a batch leaves: their names, their bins, and what counts in them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_rollout_corr import correct
from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.maths.bins import BINS, POSITION, PROBABILITY, STALENESS, Bins
from verl_rollout_corr.maths.sum_table import SUMS, Kind, layout
from verl_rollout_corr.maths.sums import Sums


def sums(
    train: torch.Tensor, rollout: torch.Tensor, config: dict[str, Any] | None = None, **more: Any
) -> dict[str, float]:
    """Totals and maxima of a batch of response tokens."""
    return correct(train, rollout, torch.ones(train.shape), config or {}, **more).sums.to_host().numbers


def counts(numbers: dict[str, float], bins: Bins) -> dict[str, float]:
    """Tokens by bin, empty ones left out."""
    found = {label: numbers[f"{bins.kind}/{label}/n"] for label in bins.labels}
    return {label: count for label, count in found.items() if count}


@pytest.mark.parametrize("bins", BINS, ids=lambda bins: bins.kind)
def test_a_bin_more_than_edges(bins: Bins) -> None:
    """And edges in order."""
    assert len(bins.labels) == len(set(bins.labels)) == len(bins.edges) + 1
    assert list(bins.edges) == sorted(bins.edges)


def test_a_row_has_one_name() -> None:
    """And no two entries of a layout have the same."""
    assert len({row.name for row in SUMS}) == len(SUMS)
    entries = layout(
        parse({"weights": {"level": "token"}, "reject": {"token_k3": {"upper": 1}, "seq_max_k1": {"lower": 0.5}}})
    )
    names = entries.totals + entries.maxima
    assert len(set(names)) == len(names)
    assert not any("{" in name for name in names)


def test_core_has_no_bins() -> None:
    """And all other sums."""
    every, core = (layout(parse({"metrics": word})) for word in ("all", "core"))
    assert [name for name in every.totals if not name.startswith("by_")] == list(core.totals)
    assert every.maxima == core.maxima
    assert {name.split("/")[0] for name in set(every.totals) - set(core.totals)} == {bins.kind for bins in BINS}


@pytest.mark.parametrize(
    ("probability", "label"),
    [
        (0.0, "0_0.01"),
        (0.009, "0_0.01"),
        (0.011, "0.01_0.1"),
        (0.1001, "0.1_0.5"),
        (0.499, "0.1_0.5"),
        (0.5, "0.5_0.9"),
        (0.95, "0.9_1"),
        (1.0, "0.9_1"),
        (1.0005, "0.9_1"),  # log 1, rounded
    ],
)
def test_probability_bins(probability: float, label: str) -> None:
    """Of mu, whatever the trainer says; an edge belongs to the bin above it."""
    log = math.log(probability) if probability else -90
    numbers = sums(torch.full((1, 1), -2.0), torch.tensor([[log]], dtype=torch.float64))
    assert counts(numbers, PROBABILITY) == {label: 1.0}


def test_position_bins_count_response_tokens() -> None:
    """20,000 response tokens behind a prompt and around a tool's answer: positions are of the response."""
    mask = torch.ones(1, 20_100)
    mask[0, :50] = mask[0, 60:110] = 0
    one = torch.full(mask.shape, -1.0)
    numbers = correct(one, one, mask, {}).sums.to_host().numbers
    widths = [edge - before for before, edge in zip((0, *POSITION.edges), (*POSITION.edges, 20_000), strict=True)]
    assert counts(numbers, POSITION) == dict(zip(POSITION.labels, widths, strict=True))


def test_staleness_bins() -> None:
    """By row; without staleness every row is unknown."""
    lags = [-1, 0, 1, 2, 3, 4, 5, 8, 9, 1000]
    rows = torch.full((len(lags), 2), -1.0)
    numbers = sums(rows, rows, staleness=torch.tensor(lags))
    want = {"unknown": 2, "lag_0": 2, "lag_1": 2, "lag_2": 2, "lag_3_4": 4, "lag_5_8": 4, "lag_9_up": 4}
    assert counts(numbers, STALENESS) == want
    assert counts(sums(rows, rows), STALENESS) == {"unknown": 20.0}


@given(st.lists(st.tuples(st.floats(-9, 0), st.floats(-9, 0)), min_size=1, max_size=20))
def test_bins_are_a_partition(pairs: list[tuple[float, float]]) -> None:
    """Every token is in one bin of each kind, with what it adds to the whole."""
    train, rollout = (torch.tensor([column], dtype=torch.float64) for column in zip(*pairs, strict=True))
    numbers = sums(train, rollout)
    for bins in BINS:
        for part in ("n", "finite", "kl", "k3", "tv"):
            parts = math.fsum(numbers[f"{name}/{part}"] for name in bins.names)
            assert parts == pytest.approx(numbers[f"token/{part}"], rel=1e-12, abs=1e-12)


def test_exact_zeros_beside_doubt() -> None:
    """A missing log-prob stored as 0.0 is one where the other side is not near certainty."""
    train = torch.tensor([[-5.0, 0.0, -0.002, -0.0005, 0.0, -1e-9]])
    rollout = torch.tensor([[0.0, -5.0, 0.0, 0.0, 0.0, -5.0]])
    numbers = sums(train, rollout)
    assert (numbers["token/zero_rollout"], numbers["token/zero_train"]) == (2.0, 1.0)


def test_invalid_rows_count_in_the_rejections_only() -> None:
    """One row of three is invalid, and one is empty: two sequences, of which the mismatch sees one."""
    train = torch.tensor([[-1.0, -1.0], [math.nan, -1.0], [-1.0, -1.0]])
    mask = torch.tensor([[1, 1], [1, 1], [0, 0]])
    config = {"invalid": "reject", "weights": {"level": "seq_sum"}, "reject": {"seq_mean_k3": {"upper": 1}}}
    numbers = correct(train, torch.full_like(train, -1.0), mask, config).sums.to_host().numbers
    counted = {name: numbers[name] for name in numbers if name.startswith("all/")}
    assert counted == {
        "all/tokens": 4,
        "all/seqs": 2,
        "all/rejected_tokens": 2,
        "all/touched_seqs": 1,
        "all/dropped_seqs": 1,
        "all/invalid_seqs": 1,
    }
    assert numbers["token/n"] == 2
    assert numbers["seq/n"] == numbers["weight/n"] == numbers["criterion/seq_mean_k3/n"] == 1


@pytest.mark.parametrize(
    "config", [{}, {"weights": {"level": "seq_mean"}}, {"reject": {"turn_max_k1": {"lower": 0.5}}}]
)
def test_the_sums_of_nothing(config: dict[str, Any]) -> None:
    """Zero totals and no maximum; the neutral element is what an empty batch leaves."""
    zero = Sums.zero(parse(config))
    assert set(zero.totals.tolist()) == {0.0}
    assert set(zero.maxima.tolist()) == {-math.inf}
    assert set(zero.counts.tolist()) == {0}
    empty = correct(torch.zeros(0, 3), torch.zeros(0, 3), torch.zeros(0, 3), config).sums
    assert empty.to_host() == zero.to_host()
    one = torch.full((1, 1), -1.0)
    assert list(sums(one, one, config)) == list(zero.to_host().numbers)


def test_constant_rows() -> None:
    """Eight equal log-probs of the engine beside others of the trainer; seven, or a trainer that is constant too, are
    not suspicious.
    """
    rollout = torch.full((5, 8), -1.0)
    train = -torch.arange(1.0, 9.0).expand(5, 8).clone()
    train[1] = -2.0
    rollout[2, 7] = -1.5
    mask = torch.ones(5, 8)
    mask[3, 0] = 0
    mask[4] = 0
    found = correct(train, rollout, mask, {}).sums.to_host().numbers
    assert (found["seq/constant_rollout"], found["seq/n"]) == (1.0, 4.0)


def test_each_kind_has_rows() -> None:
    """One histogram, and totals and maxima."""
    assert [row.kind for row in SUMS].count(Kind.COUNTS) == 1
