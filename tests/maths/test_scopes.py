"""Units and layout: which tokens belong together, and answers in the layout of the question."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from verl_rollout_corr.grammar import Agg, Scope
from verl_rollout_corr.maths.scopes import aggregate, layout_of, to_padded, units_of

MASK = torch.tensor([[0, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0], [1, 0, 1, 0, 1, 0]]).bool()
VALUES = torch.arange(24, dtype=torch.float64).reshape(4, 6)
masks = st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4).map(torch.tensor)


def by_token(scope: Scope, agg: Agg | None, values: Tensor = VALUES, mask: Tensor = MASK) -> list[list[float]]:
    """Each response token the value of its unit, 0 elsewhere."""
    units = units_of(scope, mask)
    outside = 0.0 if agg in (Agg.SUM, Agg.MEAN) else math.nan  # values that are summed are 0 there
    spread = units.spread(aggregate(torch.where(mask, values, outside), units, agg))
    return torch.where(mask, spread, 0.0).tolist()


def test_turns_by_hand() -> None:
    """A turn is a maximal run of response tokens; rows are apart."""
    assert by_token(Scope.TURN, Agg.SUM) == [
        [0, 3, 3, 0, 4, 0],
        [51, 51, 51, 51, 51, 51],
        [0, 0, 0, 0, 0, 0],
        [18, 0, 20, 0, 22, 0],
    ]
    assert by_token(Scope.TURN, Agg.MEAN)[0] == [0, 1.5, 1.5, 0, 4, 0]
    assert by_token(Scope.TURN, Agg.MAX)[0] == [0, 2, 2, 0, 4, 0]


def test_sequences_by_hand() -> None:
    """Prompt, tool text and padding are no part of a row's unit."""
    assert by_token(Scope.SEQ, Agg.SUM) == [[0, 7, 7, 0, 7, 0], [51] * 6, [0] * 6, [60, 0, 60, 0, 60, 0]]
    assert by_token(Scope.SEQ, Agg.MEAN)[0] == pytest.approx([0, 7 / 3, 7 / 3, 0, 7 / 3, 0])
    assert by_token(Scope.SEQ, Agg.MAX)[3] == [22, 0, 22, 0, 22, 0]


def test_how_many_units() -> None:
    """Tokens, turns and non-empty rows; no slot for what is outside."""
    for scope, count in ((Scope.TOKEN, 12), (Scope.TURN, 6), (Scope.SEQ, 3), (Scope.BATCH, 12)):
        assert int(units_of(scope, MASK).exists.sum()) == count, scope


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (3, 0), (2, 4)])
@pytest.mark.parametrize("scope", list(Scope))
def test_nothing(shape: tuple[int, int], scope: Scope) -> None:
    """No rows, no columns, no response token: no unit, and every operation is defined."""
    mask = torch.zeros(shape, dtype=torch.bool)
    units = units_of(scope, mask)
    assert not units.exists.any()
    for agg in (None, *Agg):
        assert units.spread(aggregate(torch.zeros(shape).double(), units, agg)).shape == shape


def test_one_infinity_rules_sums_and_means() -> None:
    """A token of probability 0 gives its unit the product and the geometric mean 0; +inf stays."""
    inf = math.inf
    mask, values = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[1.0, -inf, 3.0, 2.0]]).double()
    assert by_token(Scope.SEQ, Agg.MEAN, values, mask) == [[-inf] * 4]
    assert by_token(Scope.SEQ, Agg.SUM, values, mask) == [[-inf] * 4]
    assert by_token(Scope.SEQ, Agg.MAX, values, mask) == [[3.0] * 4]
    assert by_token(Scope.SEQ, Agg.MEAN, torch.full_like(values, -inf), mask) == [[-inf] * 4]
    assert by_token(Scope.SEQ, Agg.MEAN, -values, mask) == [[inf] * 4]


@given(masks)
def test_sums_over_units_add_up(mask: Tensor) -> None:
    """Tokens, turns and rows partition the response: each scope's units sum to the same."""
    values = torch.where(mask, torch.arange(mask.numel(), dtype=torch.float64).reshape(mask.shape), 0.0)
    for scope in (Scope.TOKEN, Scope.TURN, Scope.SEQ):
        units = units_of(scope, mask)
        assert float(units.total(values).sum()) == float(values.sum())
        assert float(units.count.sum()) == int(mask.sum())


@given(masks)
def test_turns_are_runs(mask: Tensor) -> None:
    """As many turns as the response starts."""
    starts = sum(row[i] and (i == 0 or not row[i - 1]) for row in mask.tolist() for i in range(len(row)))
    assert int(units_of(Scope.TURN, mask).exists.sum()) == starts


def jagged(*rows: list[float]) -> Tensor:
    """Rows as they are, packed."""
    return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def test_jagged_there_and_back() -> None:
    """Padded on the right with 0, and answered with the offsets of the question."""
    question = jagged([1.0, 2.0, 3.0], [4.0], [])
    padded = to_padded(question)
    assert padded.tolist() == [[1, 2, 3], [4, 0, 0], [0, 0, 0]]
    answer = layout_of(question).answer(padded * 10)
    assert answer.is_nested
    assert answer.values().tolist() == [10, 20, 30, 40]
    assert torch.equal(answer.offsets(), question.offsets())
    (answer * question).sum()  # they share their shape, so that arithmetic between them works


def test_padded_stays_as_it_is() -> None:
    """No copy."""
    assert to_padded(VALUES) is VALUES
    assert layout_of(VALUES).answer(VALUES) is VALUES


def test_a_jagged_batch_without_rows() -> None:
    """(0, 0), and back."""
    empty = torch.nested.nested_tensor_from_jagged(torch.zeros(0), torch.zeros(1, dtype=torch.int64))
    padded = to_padded(empty)
    assert padded.shape == (0, 0)
    assert layout_of(empty).answer(padded).values().tolist() == []
