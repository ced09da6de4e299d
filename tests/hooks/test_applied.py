"""Counts of what the loss was given: additive, whatever travels with whatever."""

from __future__ import annotations

import functools
import operator
import pickle

import pytest
import torch

from verl_rollout_corr.hooks.applied import Applied
from verl_rollout_corr.hooks.transport import Carried, gather

MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]]).bool()
KEPT = torch.tensor([[1, 0, 0], [1, 0, 0], [0, 0, 0]]).bool()
WEIGHTS = torch.tensor([[0.5, 9.0, float("nan")], [2.0, 0.0, 0.0], [7.0, 7.0, 7.0]])
NOTHING = torch.zeros_like(MASK)


def counts(applied: Applied) -> tuple[int, int, float, int]:
    return applied.tokens, applied.kept, applied.weight_sum, applied.empty_micro_batches


def test_counts_of_a_micro_batch() -> None:
    """Only weights of kept tokens count, and a NaN outside them leaves no trace."""
    assert counts(Applied.to_micro_batch(0, MASK, KEPT, WEIGHTS)) == (3, 2, 2.5, 0)
    assert counts(Applied.to_micro_batch(0, MASK, KEPT, None)) == (3, 2, 2.0, 0)


@pytest.mark.parametrize(("mask", "empty"), [(MASK, 1), (NOTHING, 0)])
def test_empty_is_a_micro_batch_that_had_tokens(mask: torch.Tensor, empty: int) -> None:
    """A micro-batch of padding rows has lost nothing."""
    found = Applied.to_micro_batch(3, mask, NOTHING, None)
    assert found.empty_micro_batches == empty and found.empty_ranks == [3] * empty


def test_rows_in_any_grouping_give_the_same() -> None:
    parts = [Applied.to_micro_batch(rank, MASK, KEPT, WEIGHTS) for rank in (0, 1, 0, 2)]
    assert sum(part.clipped for part in parts) == 0
    parts.append(Applied.to_micro_batch(1, MASK, NOTHING, WEIGHTS))
    one_by_one = functools.reduce(operator.add, parts)
    in_two = (parts[4] + parts[2]) + (parts[1] + (parts[0] + parts[3]))
    assert counts(one_by_one) == counts(in_two) == (15, 8, 10.0, 1)
    assert one_by_one.empty_ranks == [] and sorted(one_by_one.by_rank) == [0, 1, 2]


def test_travels_through_verls_metrics() -> None:
    """As a pickle, in a list, through numpy's mean."""
    part = Carried(Applied.to_micro_batch(0, MASK, KEPT, WEIGHTS))
    assert counts(gather([pickle.loads(pickle.dumps(part)), [part]])) == (6, 4, 5.0, 0)


def test_only_kept_tokens_are_silenced_by_the_clip() -> None:
    clipped = torch.tensor([[1, 1, 1], [0, 1, 0], [1, 1, 1]]).bool()
    part = Applied.to_micro_batch(0, MASK, KEPT, None, clipped)
    assert part.clipped == 1 and (part + part).clipped == 2
