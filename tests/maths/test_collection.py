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
from verl_rollout_corr.maths.collection import (
    POSITION_BINS,
    POSITION_EDGES,
    PROBABILITY_BINS,
    PROBABILITY_CENTRES,
    PROBABILITY_EDGES,
    STALENESS_BINS,
    STALENESS_EDGES,
    collect_nothing,
)

KINDS = {"prob": PROBABILITY_BINS, "position": POSITION_BINS, "staleness": STALENESS_BINS}


def sums(
    train: torch.Tensor, rollout: torch.Tensor, config: dict[str, Any] | None = None, **more: Any
) -> tuple[dict[str, float], dict[str, float]]:
    """Totals and maxima of a batch of response tokens."""
    return correct(train, rollout, torch.ones(train.shape), config or {}, **more).sums.to_host()


def counts(totals: dict[str, float], kind: str) -> dict[str, float]:
    """Tokens by bin, empty ones left out."""
    return {label: totals[f"{kind}/{label}/n"] for label in KINDS[kind] if totals[f"{kind}/{label}/n"]}


@pytest.mark.parametrize(
    ("bins", "edges"),
    [(PROBABILITY_BINS, PROBABILITY_EDGES), (POSITION_BINS, POSITION_EDGES), (STALENESS_BINS, STALENESS_EDGES)],
)
def test_a_bin_more_than_edges(bins: tuple[str, ...], edges: tuple[float, ...]) -> None:
    """And edges in order."""
    assert len(bins) == len(set(bins)) == len(edges) + 1
    assert list(edges) == sorted(edges)


def test_the_centres_are_in_their_bins() -> None:
    """Or at an end of them: about them the moments of the bin are small."""
    ends = (0.0, *PROBABILITY_EDGES, 1.0)
    for low, centre, high in zip(ends[:-1], PROBABILITY_CENTRES, ends[1:], strict=True):
        assert low <= centre <= high


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
    log = math.log(probability) if probability else -1e4
    totals, _ = sums(torch.full((1, 1), -2.0), torch.tensor([[log]], dtype=torch.float64))
    assert counts(totals, "prob") == {label: 1.0}


def test_position_bins_count_response_tokens() -> None:
    """20,000 response tokens behind a prompt and around a tool's answer: positions are of the response."""
    mask = torch.ones(1, 20_100)
    mask[0, :50] = mask[0, 60:110] = 0
    one = torch.full(mask.shape, -1.0)
    totals, _ = correct(one, one, mask, {}).sums.to_host()
    widths = [edge - before for before, edge in zip((0, *POSITION_EDGES), (*POSITION_EDGES, 20_000), strict=True)]
    assert counts(totals, "position") == dict(zip(POSITION_BINS, widths, strict=True))


def test_staleness_bins() -> None:
    """By row; without staleness every row is unknown."""
    lags = [-1, 0, 1, 2, 3, 4, 5, 8, 9, 1000]
    rows = torch.full((len(lags), 2), -1.0)
    totals, _ = sums(rows, rows, staleness=torch.tensor(lags))
    want = {"unknown": 2, "lag_0": 2, "lag_1": 2, "lag_2": 2, "lag_3_4": 4, "lag_5_8": 4, "lag_9_up": 4}
    assert counts(totals, "staleness") == want
    assert counts(sums(rows, rows)[0], "staleness") == {"unknown": 20.0}


@given(st.lists(st.tuples(st.floats(-9, 0), st.floats(-9, 0)), min_size=1, max_size=20))
def test_bins_are_a_partition(pairs: list[tuple[float, float]]) -> None:
    """Every token is in one bin of each kind, with what it adds to the whole."""
    train, rollout = (torch.tensor([column], dtype=torch.float64) for column in zip(*pairs, strict=True))
    totals, _ = sums(train, rollout)
    for kind, labels in KINDS.items():
        for part in ("n", "finite", "kl", "k3", "tv"):
            parts = math.fsum(totals[f"{kind}/{label}/{part}"] for label in labels)
            assert parts == pytest.approx(totals[f"token/{part}"], rel=1e-12, abs=1e-12)


def test_exact_zeros_beside_doubt() -> None:
    """A missing log-prob stored as 0.0 is one where the other side is not near certainty."""
    train = torch.tensor([[-5.0, 0.0, -0.05, 0.0, -1e-9]])
    rollout = torch.tensor([[0.0, -5.0, 0.0, 0.0, -5.0]])
    totals, _ = sums(train, rollout)
    assert (totals["token/zero_rollout"], totals["token/zero_train"]) == (1.0, 1.0)


def test_invalid_rows_count_in_the_rejections_only() -> None:
    """One row of three is invalid, and one is empty: two sequences, of which the mismatch sees one."""
    train = torch.tensor([[-1.0, -1.0], [math.nan, -1.0], [-1.0, -1.0]])
    mask = torch.tensor([[1, 1], [1, 1], [0, 0]])
    config = {"invalid": "reject", "weights": {"level": "seq_sum"}, "reject": {"seq_mean_k3": {"upper": 1}}}
    totals, _ = correct(train, torch.full_like(train, -1.0), mask, config).sums.to_host()
    counted = {name: totals[name] for name in totals if name.startswith("all/")}
    assert counted == {
        "all/tokens": 4,
        "all/seqs": 2,
        "all/rejected_tokens": 2,
        "all/touched_seqs": 1,
        "all/dropped_seqs": 1,
        "all/invalid_seqs": 1,
    }
    assert totals["token/n"] == 2
    assert totals["seq/n"] == totals["weight/n"] == totals["criterion/seq_mean_k3/n"] == 1


@pytest.mark.parametrize(
    "config", [{}, {"weights": {"level": "seq_mean"}}, {"reject": {"turn_max_k1": {"lower": 0.5}}}]
)
def test_the_sums_of_nothing(config: dict[str, Any]) -> None:
    """Zero totals and no maximum, under the names of every other batch of that configuration."""
    totals, maxima = collect_nothing(parse(config)).to_host()
    assert set(totals.values()) == {0.0}
    assert set(maxima.values()) == {-math.inf}
    one = torch.full((1, 1), -1.0)
    found = sums(one, one, config)
    assert (list(found[0]), list(found[1])) == (list(totals), list(maxima))
