"""The first invalid log-prob of bypass mode's forward pass, whatever the micro-batches: named before a step."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hooks import direct
from hooks.actor import Job
from hooks.pool import Pool
from hooks.rows import Row
from verl_rollout_corr.errors import HookError
from verl_rollout_corr.hooks.first_invalid import FirstInvalid, first_invalid
from verl_rollout_corr.hooks.wire import ROW

VALUES = st.sampled_from([-1.0, -math.inf, 0.0, math.nan, math.inf, 0.5])


@given(
    st.lists(st.lists(st.tuples(VALUES, st.booleans()), min_size=3, max_size=3), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_any_cut_in_any_order_gives_the_first(batch: list[list[tuple[float, bool]]], random: Any) -> None:
    """Found by a loop over rows and positions."""
    places = [
        (row, position, value)
        for row, tokens in enumerate(batch)
        for position, (value, inside) in enumerate(tokens)
        if inside and not value <= 1e-3
    ]
    order = list(range(len(batch)))
    random.shuffle(order)
    parts = []
    while order:
        size = random.randint(1, len(order))
        chunk, order = order[:size], order[size:]
        train = torch.tensor([[value for value, _ in batch[row]] for row in chunk])
        mask = torch.tensor([[int(inside) for _, inside in batch[row]] for row in chunk])
        found = first_invalid(torch.tensor(chunk), train, torch.full_like(train, -1.0), mask)
        parts.append(FirstInvalid(*found.tolist()))
    first = min(parts)
    assert sum(part.rows for part in parts) == len({row for row, _, _ in places})
    if places:
        row, position, value = places[0]
        assert str(first) == f"{value} at row {row}, position {position}"
    else:
        assert first.row == math.inf


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_a_micro_batch_of_nothing(shape: tuple[int, int]) -> None:
    nothing = torch.zeros(shape)
    found = FirstInvalid(*first_invalid(torch.zeros(shape[0], dtype=torch.int64), nothing, nothing, nothing).tolist())
    assert found.row == math.inf and found.rows == 0


def spoiled(drawn: list[Row], *places: tuple[int, int], value: float = math.nan) -> list[Row]:
    """Rows of bypass mode, numbered from 20. The engine's log-probs stand in for the trainer's: both are judged so."""
    rows = [
        row.having(old_log_probs=row.columns["rollout_log_probs"], **{ROW: torch.tensor(20 + number)})
        for number, row in enumerate(drawn)
    ]
    for number, position in places:
        changed = rows[number].columns["old_log_probs"].clone()
        changed[position] = value
        rows[number] = rows[number].having(old_log_probs=changed)
    return rows


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.5])
def test_the_run_stops_before_the_optimiser_steps(pools: dict[int, Pool], drawn: list[Row], value: float) -> None:
    """The row is that of the trainer's batch; the second mini-batch is not reached."""
    rows = spoiled(drawn, (1, 3), (3, 1), value=value)
    with pytest.raises(RuntimeError) as error:
        pools[1].run(Job(rows, {"mode": "bypass"}, micro=1, mini_batches=2, epochs=2))
    said = r"InputError: rollout_corr: the trainer's log-prob is \S+ at row 21, position 3, and 2 rows of"
    assert re.search(said, str(error.value)), str(error.value)[-2000:]
    assert "set rollout_corr.invalid=reject to go on" in str(error.value)
    assert "steps of the optimiser: 0" in str(error.value)


def test_one_in_the_second_mini_batch_stops_before_the_second_step(pools: dict[int, Pool], drawn: list[Row]) -> None:
    with pytest.raises(RuntimeError, match=r"at row 26, position 0, and 1 rows") as error:
        pools[1].run(Job(spoiled(drawn, (6, 0)), {"mode": "bypass"}, micro=1, mini_batches=2))
    assert "steps of the optimiser: 1" in str(error.value)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_what_may_go_on_goes_on(pools: dict[int, Pool], drawn: list[Row], value: float) -> None:
    """With `invalid: reject`."""
    answer = pools[1].run(Job(spoiled(drawn, (1, 3), value=value), {"mode": "bypass", "invalid": "reject"}, micro=1))
    assert len(answer.gradients) == 1


def test_a_trainer_that_did_not_number_the_rows(drawn: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row.having(old_log_probs=row.columns["rollout_log_probs"]) for row in drawn]
    config = direct.configuration({"mode": "bypass"}, monkeypatch)

    def without_numbers(*, data: Any, **given: Any) -> Any:
        return direct.hooked(data=data.exclude(ROW), **given)

    with pytest.raises(HookError, match=r"no column rollout_corr_row.*did not say what it decided on"):
        direct.call(config, rows, function=without_numbers)
