"""Counts add: a dump read in one block or in several gives the same evidence."""

from __future__ import annotations

import numpy as np

from report.batches import rows
from verl_rollout_corr.report.evidence import WORST, Evidence, Rows


def part(whole: Rows, first: int, last: int) -> Rows:
    """Rows first to last - 1 of a block."""
    inside = (whole.owner >= first) & (whole.owner < last)
    tokens = {
        name: getattr(whole, name)[inside] for name in ("train", "rollout", "position", "keep", "weight", "token")
    }
    per_row = {name: getattr(whole, name)[first:last] for name in ("row", "step", "lag", "length")}
    return Rows(owner=whole.owner[inside] - first, **per_row, **tokens)


def test_blocks_add_to_the_whole() -> None:
    block = rows(1)
    whole, parts = Evidence(), Evidence()
    whole.add(block)
    for first in range(0, 40, 7):
        parts.add(part(block, first, min(first + 7, 40)))
    for name in ("scatter", "ratios", "weights"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(parts, name))
    for name in ("positions", "lengths"):
        np.testing.assert_allclose(getattr(whole, name), getattr(parts, name), rtol=1e-12)
    assert sorted(one.row for one in whole.worst) == sorted(one.row for one in parts.worst)
    assert whole.steps[1].tokens == parts.steps[1].tokens == block.length.sum()


def test_the_worst_rows_are_those_with_the_largest_mean_k3() -> None:
    block = rows(2)
    evidence = Evidence()
    evidence.add(block)
    log_ratio = block.train - block.rollout
    mean = np.bincount(block.owner, np.expm1(log_ratio) - log_ratio) / block.length
    assert {one.row for one in evidence.worst} == set(np.argsort(-mean)[:WORST].tolist())


def test_every_token_is_counted_once() -> None:
    block = rows(3)
    evidence = Evidence()
    evidence.add(block)
    total = block.length.sum()
    assert evidence.scatter.sum() == evidence.ratios.sum() == evidence.weights.sum() == total
    assert evidence.positions[0].sum() == evidence.lengths[3].sum() == total


def test_probability_zero_is_no_number_of_a_chart() -> None:
    block = rows(4)
    block.train[0] = -np.inf
    evidence = Evidence()
    evidence.add(block)
    assert np.isfinite(evidence.positions[2]).all()
    assert evidence.steps[1].finite == block.length.sum() - 1
