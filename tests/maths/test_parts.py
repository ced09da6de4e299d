"""A batch in parts: how many rows each has, and what is padded."""

from __future__ import annotations

import pytest
import torch

from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.maths import parts
from verl_rollout_corr.maths.correction import correct
from verl_rollout_corr.maths.inputs import prepare
from verl_rollout_corr.maths.parts import Part, Parts


def parts_of(train: torch.Tensor, mask: torch.Tensor) -> list[Part]:
    """The parts of a checked batch."""
    return list(Parts(prepare(train, train, mask, parse({}), advantages=None, group_ids=None, staleness=None)))


def jagged(lengths: list[int]) -> torch.Tensor:
    """Rows of these lengths."""
    return torch.nested.nested_tensor([torch.full((length,), -1.0) for length in lengths], layout=torch.jagged)


@pytest.mark.parametrize(
    ("lengths", "want"),
    [
        ([4, 4, 4, 4, 4], [(2, 4), (2, 4), (1, 4)]),  # 8 positions
        ([9, 1, 1, 1, 8, 1], [(1, 9), (3, 1), (1, 8), (1, 1)]),  # one row may be longer
        ([1] * 9, [(8, 1), (1, 1)]),
        ([0, 0, 3], [(2, 0), (1, 3)]),  # three rows of 3 would be 9
    ],
)
def test_jagged_rows_are_padded_to_the_longest_of_their_part(
    lengths: list[int], want: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows stay in their order, and as many come together as have room."""
    monkeypatch.setattr(parts, "PART_TOKENS", 8)
    rows = jagged(lengths)
    found = parts_of(rows, torch.ones_like(rows))
    assert [tuple(part.mask.shape) for part in found] == want
    assert sum(int(part.mask.sum()) for part in found) == sum(lengths)


def test_padded_rows_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """And columns after the last response token of a part are left out."""
    monkeypatch.setattr(parts, "PART_TOKENS", 8)
    train, mask = torch.full((3, 4), -1.0), torch.ones(3, 4, dtype=torch.bool)
    mask[:2, 2:] = False
    found = parts_of(train, mask)
    assert [tuple(part.train.shape) for part in found] == [(2, 2), (1, 4)]
    assert [part.train.data_ptr() for part in found] == [train.data_ptr(), train[2:].data_ptr()]


def test_a_part_that_ends_before_its_longest_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer covers tokens that are not of the response, jagged too."""
    monkeypatch.setattr(parts, "PART_TOKENS", 8)
    rows = jagged([5, 2, 3])
    values = torch.tensor([1, 1, 0, 0, 0, 1, 1, 1, 0, 1])
    mask = torch.nested.nested_tensor_from_jagged(values, rows.offsets())
    found = correct(rows, rows, mask, parse({"weights": {"level": "token"}}))
    assert found.keep.values().tolist() == values.tolist()
    assert found.weights is not None
    assert found.weights.values().tolist() == values.float().tolist()
    assert torch.equal(found.keep.offsets(), rows.offsets())
