"""The first invalid log-prob of an update, whatever the micro-batches, ranks and epochs."""

from __future__ import annotations

import math
import pickle
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
from verl_rollout_corr.hooks.first_invalid import FirstInvalid
from verl_rollout_corr.hooks.transport import Carried, gather
from verl_rollout_corr.hooks.wire import FIRST_INVALID_METRIC, ROW

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
        parts.append(Carried(FirstInvalid.of(torch.tensor(chunk), train, torch.full_like(train, -1.0), mask)))
    found = gather([pickle.loads(pickle.dumps(part)) for part in parts])
    if places:
        row, position, value = places[0]
        assert str(found) == f"{value} at row {row}, position {position}"
    else:
        assert found.place[0] == math.inf


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_a_micro_batch_of_nothing(shape: tuple[int, int]) -> None:
    nothing = torch.zeros(shape)
    found = FirstInvalid.of(torch.zeros(shape[0], dtype=torch.int64), nothing, nothing, nothing)
    assert found.place[0] == math.inf


def test_two_ranks_and_several_micro_batches_name_the_row_of_the_trainers_batch(
    pools: dict[int, Pool], drawn: list[Row]
) -> None:
    """The engine's log-probs stand in for the trainer's: both are judged in the same way."""
    rows = [
        row.having(old_log_probs=row.columns["rollout_log_probs"], **{ROW: torch.tensor(20 + number)})
        for number, row in enumerate(drawn)
    ]
    for number, position in ((6, 3), (3, 1)):
        spoiled = rows[number].columns["old_log_probs"].clone()
        spoiled[position] = math.nan
        rows[number] = rows[number].having(old_log_probs=spoiled)
    answer = pools[2].run(Job(rows, {"mode": "bypass"}, micro=1, mini_batches=2, epochs=2))
    place = gather(answer.metrics["actor/" + FIRST_INVALID_METRIC]).place
    assert place[:2].tolist() == [23, 1]


def test_a_trainer_that_did_not_number_the_rows(drawn: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row.having(old_log_probs=row.columns["rollout_log_probs"]) for row in drawn]
    config = direct.configuration({"mode": "bypass"}, monkeypatch)

    def without_numbers(*, data: Any, **given: Any) -> Any:
        return direct.hooked(data=data.exclude(ROW), **given)

    with pytest.raises(HookError, match=r"no column rollout_corr_row.*did not check it"):
        direct.call(config, rows, function=without_numbers)
