"""What reached the actors is what the trainer sent: looked at before anything is trained on, without a worker."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu

from hooks import direct, rows, trainers
from hooks.rows import Row
from verl_rollout_corr.configuration.parser import parse
from verl_rollout_corr.errors import HookError
from verl_rollout_corr.hooks import wire
from verl_rollout_corr.hooks.share import Share, current_share, sent_along, wrap_train_mini_batch

RUN = trainers.run({}, ppo_mini_batch_size=4, ppo_epochs=2).actor_rollout_ref
MAPPING: dict[str, Any] = {"reject": {"token_k1": {"upper": 2.0}}}
UPDATE = 7


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As much of verl's TrainingWorker as an update begins with."""
    config = direct.configuration(MAPPING, monkeypatch)
    engine = SimpleNamespace(get_data_parallel_group=lambda: None)
    return SimpleNamespace(loss_fn=partial(direct.hooked, config=config), engine=engine, device_name="cpu")


def arrived(drawn: list[Row], along: dict[str, Any] | None = None, *, sent: list[Row] | None = None) -> Any:
    """What one rank gets of `sent`, with what the trainer sends beside it."""
    data = tu.get_tensordict(rows.queue_form(drawn, update=UPDATE), {})
    beside = sent_along(parse(MAPPING), rows.digests(sent or drawn, UPDATE), UPDATE, RUN)
    tu.assign_non_tensor(data, **json.loads(beside[wire.TRAINED_WITH]), **beside | (along or {}))
    return data


def train(worker: Any, data: Any, mini_batches: list[list[int]]) -> int:
    """verl's loop over mini-batches of these rows; the number of steps, which the worker counts."""
    worker.steps = 0

    def train_mini_batch(self: Any, data: Any) -> Any:
        for mini_batch in mini_batches:
            current_share().confirm(self)
            current_share().take(mini_batch)
            self.steps += 1

    wrap_train_mini_batch(train_mini_batch)(worker, data)
    return worker.steps


ALL = [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_each_row_in_each_epoch(worker: Any, decided: list[Row]) -> None:
    assert train(worker, arrived(decided), ALL * 2) == 4
    with pytest.raises(HookError, match=r"outside of the train_mini_batch that compares .* put another function in"):
        current_share()


def test_without_a_preset_nothing_is_looked_at(decided: list[Row]) -> None:
    """A critic, or an actor of an uncorrected run. V1 hands its critic the description of a batch."""
    described = KVBatchMeta(partition_id="train", keys=["a"], tags=[{}], fields=[wire.DIGEST])
    for data in (arrived(decided).exclude(wire.DIGEST), described):
        assert wrap_train_mini_batch(lambda self, data: "verl's")(SimpleNamespace(loss_fn=None), data) == "verl's"


def refused(worker: Any, data: Any, mini_batches: list[list[int]], message: str, *, steps: int = 0) -> None:
    with pytest.raises(HookError, match=message):
        train(worker, data, mini_batches)
    assert worker.steps == steps


@pytest.mark.parametrize(
    "name", [wire.UPDATE, wire.BATCH_DIGEST, wire.DECIDED_WITH, wire.TRAINED_WITH, wire.TABLES, wire.ROW, wire.DIGEST]
)
def test_a_trainer_that_does_not_say_it(worker: Any, decided: list[Row], name: str) -> None:
    refused(worker, arrived(decided).exclude(name), ALL * 2, f"the actor's batch does not say {name}, so the trainer's")


def test_a_loss_that_replaced_the_actors(worker: Any, decided: list[Row]) -> None:
    """After the start, by one that carries nothing of ours."""
    worker.loss_fn = lambda **named: None
    refused(worker, arrived(decided), ALL * 2, "its loss is <function.*something has replaced the actor's loss")
    worker.loss_fn = None
    refused(worker, arrived(decided), ALL * 2, "its loss is None, without the correction in front of it")


def test_an_actor_with_another_configuration(worker: Any, decided: list[Row]) -> None:
    """One worker whose bound, or whose whole preset, is another one; the preset's name and the dump may differ."""
    message = r"this actor has rollout_corr.reject=.*'upper': 2\.0.*, and the trainer .*'upper': 3\.0"
    along = sent_along(parse({"reject": {"token_k1": {"upper": 3.0}}}), torch.zeros(1), UPDATE, RUN)
    refused(worker, arrived(decided, {wire.DECIDED_WITH: along[wire.DECIDED_WITH]}), ALL * 2, message)
    same = sent_along(
        parse(MAPPING | {"dump": {"dir": "elsewhere"}, "presets": ["token_rs"]}), torch.zeros(1), UPDATE, RUN
    )
    assert same[wire.DECIDED_WITH] == sent_along(parse(MAPPING), torch.zeros(1), UPDATE, RUN)[wire.DECIDED_WITH]
    assert json.loads(same[wire.DECIDED_WITH])["mode"] == "decoupled"


def test_the_batch_of_another_update(worker: Any, decided: list[Row]) -> None:
    train(worker, arrived(decided), ALL * 2)
    refused(worker, arrived(decided), ALL * 2, "update 7 of the trainer reached this actor after update 7")
    worker.rollout_corr_update = 8
    refused(
        worker, arrived(decided), ALL * 2, "update 7 of the trainer reached this actor after update 8: what arrived"
    )


@pytest.mark.parametrize("order", [[*range(7)], [*range(7), 0], [*range(8), 0], [1, 1, *range(2, 8)]], ids=str)
def test_rows_that_are_missing_or_came_twice(worker: Any, decided: list[Row], order: list[int]) -> None:
    numbered = [row.having(**{wire.ROW: torch.tensor(number)}) for number, row in enumerate(decided)]
    data = arrived([numbered[number] for number in order], sent=numbered)
    refused(worker, data, ALL * 2, "the rows that reached the actors of all ranks are not those of the update")


def test_columns_that_are_still_those_of_the_update_before(worker: Any, decided: list[Row]) -> None:
    """Its decision with its digests, where the rest is new."""
    data = arrived(decided)
    data[wire.DIGEST] = rows.digests(decided, UPDATE - 1)
    refused(worker, data, ALL * 2, "rows are missing, came twice, or are those of another update")


def test_rows_on_other_ranks_count(worker: Any, decided: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    """The digests are added over the ranks that hold different rows."""
    worker.engine.get_data_parallel_group = lambda: "ranks"
    numbered = [row.having(**{wire.ROW: torch.tensor(number)}) for number, row in enumerate(decided)]
    here, there = numbered[:4], numbered[4:]

    exchanges: list[str] = []

    def all_reduce(found: torch.Tensor, group: str) -> None:
        exchanges.append(group)
        found += rows.digests(there, UPDATE).sum()

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    assert train(worker, arrived(here, sent=numbered), [[0, 1], [2, 3]] * 2) == 4
    assert exchanges == ["ranks"], "once per update"


def test_a_mini_batch_too_often_stops_before_its_step(worker: Any, decided: list[Row]) -> None:
    message = "row 0 of the trainer's batch comes more than 2 times in an update of 2 epochs, in the place of another"
    refused(worker, arrived(decided), [ALL[0], ALL[0], ALL[0], ALL[1]], message, steps=2)


def test_a_mini_batch_that_was_left_out(worker: Any, decided: list[Row]) -> None:
    """Nothing before the end says that it is missing."""
    message = "4 rows of the trainer's batch, the first of them row 4, reached this actor and were in too few"
    refused(worker, arrived(decided), [*ALL, ALL[0]], message, steps=3)


def test_rows_that_no_one_knows() -> None:
    with pytest.raises(HookError, match=r"row 9 .* comes more than 1 times"):
        Share([1, 2], 1, torch.tensor(0), 0).take([9])
