"""Lags of rows, with each trainer's own order of updating, publishing and numbering."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from transfer_queue import KVBatchMeta
from verl import DataProto
from verl.checkpoint_engine.base import CheckpointEngineManager
from verl.utils.ray_utils import auto_await

from verl_rollout_corr.errors import HookError
from verl_rollout_corr.hooks import driver_v0, driver_v1
from verl_rollout_corr.hooks.weight_versions import WeightHistory, history_of, wrap_update_weights


def test_a_version_per_update_as_ray_trainer_and_v1_publish() -> None:
    """Version 0 at the start; version t after update t. A row of version v is t - 1 - v versions old at step t."""
    history = WeightHistory()
    history.publish(0)
    for step in range(1, 5):
        assert history.lags(range(step), history.updates).tolist() == list(range(step - 1, -1, -1))
        history.updates += 1
        history.publish(step)


def test_one_step_off_publishes_before_the_update() -> None:
    """Version 0 before the first rollouts, version t before update t: rows carry t - 1 at step t, and are one update
    old from step 2 on.
    """
    history = WeightHistory()
    history.publish(0)
    sampled_with, lags = 0, []
    for step in range(1, 6):
        row = sampled_with
        history.publish(step)
        sampled_with = step
        lags.append(history.lag(row, history.updates))
        history.updates += 1
    assert lags == [0, 1, 1, 1, 1]


def test_versions_of_two_updates_as_separate_async_and_fully_async_publish() -> None:
    """In decoupled mode pi_old is the last published policy for both updates; in bypass mode the second has one more
    version's drift.
    """
    history = WeightHistory()
    history.publish(0)
    decoupled, bypass = [], []
    for version in range(1, 4):
        for _ in range(2):
            decoupled.append(history.lag(0, history.last_published))
            bypass.append(history.lag(0, history.updates))
            history.updates += 1
        history.publish(version)
    assert decoupled == [0, 0, 1, 1, 2, 2]
    assert bypass == [0, 1, 1, 2, 2, 3]


def test_the_lag_is_zero_exactly_for_equal_weights() -> None:
    history = WeightHistory()
    history.publish(7)  # a resumed run starts with the number of its checkpoint
    assert history.lag(7, history.updates) == 0
    history.updates += 1
    assert history.lag(7, history.updates) == 1
    history.publish(8)
    assert history.lag(8, history.updates) == 0
    assert history.lag(7, history.updates) == 1


def test_a_publication_without_an_update_is_no_new_version() -> None:
    """Critic warm-up and validation publish the same weights again, under a new number or the old one."""
    history = WeightHistory()
    for version in (0, 1, 2, 2):
        history.publish(version)
    assert history.lags([0, 1, 2], history.updates).tolist() == [0, 0, 0]
    history.updates += 1
    assert history.lags([0, 1, 2], history.updates).tolist() == [1, 1, 1]


def test_a_number_that_is_published_twice_keeps_the_older_weights() -> None:
    history = WeightHistory()
    history.publish(1)
    history.updates += 1
    history.publish(1)
    assert history.lag(1, history.updates) == 1


@pytest.mark.parametrize("version", [None, -1, 3])
def test_what_was_never_published_is_unknown(version: int | None) -> None:
    history = WeightHistory()
    history.publish(0)
    history.publish(None)
    assert history.lag(version, history.updates) == -1


class _WorkerGroup:
    """What a manager holds of the actor's workers here: an identity."""


def _manager(worker_group: _WorkerGroup) -> Any:
    class Manager:
        actor_wg = worker_group

        @auto_await
        async def update_weights(self, global_steps: int | None = None) -> dict[str, int | None]:
            await asyncio.sleep(0)
            return {"sent": global_steps}

    Manager.update_weights = wrap_update_weights(Manager.update_weights)
    return Manager()


def test_publishing_is_recorded_whether_the_trainer_awaits_or_not() -> None:
    """V1 calls update_weights from plain code, one_step_off from plain code under a running loop, fully_async awaits
    it.
    """
    workers = _WorkerGroup()
    manager = _manager(workers)

    def plain(version: int) -> Any:
        return manager.update_weights(version)

    async def under_a_loop() -> Any:
        return plain(1)

    async def awaited() -> Any:
        return await manager.update_weights(global_steps=2)

    assert plain(0) == {"sent": 0}
    assert asyncio.run(under_a_loop()) == {"sent": 1}
    history_of(workers).updates += 1
    assert asyncio.run(awaited()) == {"sent": 2}
    assert history_of(workers).lags([0, 1, 2], 1).tolist() == [1, 1, 0]


def test_an_update_that_fails_is_not_published() -> None:
    workers = _WorkerGroup()

    class Manager:
        actor_wg = workers

        @auto_await
        async def update_weights(self, global_steps: int | None = None) -> None:
            raise RuntimeError("no weights arrived")

    Manager.update_weights = wrap_update_weights(Manager.update_weights)
    with pytest.raises(RuntimeError, match="no weights arrived"):
        Manager().update_weights(0)
    assert history_of(workers).lag(0, 0) == -1


def test_a_manager_that_is_no_coroutine_is_refused() -> None:
    def update_weights(self: Any, global_steps: int | None = None) -> None: ...

    with pytest.raises(HookError, match="no longer a coroutine"):
        wrap_update_weights(update_weights)


def test_verls_manager_is_what_the_seam_was_written_for() -> None:
    assert asyncio.iscoroutinefunction(CheckpointEngineManager.update_weights.__wrapped__)


def lags(versions: Any, updates: int) -> torch.Tensor:
    """Of rows of these versions, where version i was published after update i, the newest being 3."""
    history = WeightHistory()
    for version in range(3):
        history.publish(version)
        history.updates += 1
    history.publish(3)
    return history.lags(versions, updates)


def test_rows_of_a_data_proto() -> None:
    """verl's agent loops write the versions of a row as objects, None where the server has no number."""
    versions = np.empty(4, dtype=object)
    versions[:] = [3, np.int64(1), None, 9]
    batch = DataProto.from_single_dict({"responses": torch.zeros(4, 2), "min_global_steps": versions})
    assert lags(driver_v0.oldest_versions(batch), 3).tolist() == [0, 2, -1, -1]
    bare = DataProto.from_single_dict({"responses": torch.zeros(2, 2)})
    assert lags(driver_v0.oldest_versions(bare), 3).tolist() == [-1, -1]


def test_rows_of_the_transfer_queue() -> None:
    """The oldest weights of a row count (min, not max), and padding rows have no version."""
    tags = [
        {"min_global_steps": 3, "max_global_steps": 3},
        {"min_global_steps": 1, "max_global_steps": 3},
        {"min_global_steps": None, "max_global_steps": None},
        {"min_global_steps": 3, "max_global_steps": 3, "is_padding": True},
    ]
    batch = KVBatchMeta(partition_id="train", keys=[f"row{i}" for i in range(4)], tags=tags)
    assert lags(driver_v1.oldest_versions(batch), 3).tolist() == [0, 2, -1, -1]
    assert lags(driver_v1.oldest_versions(batch), 4).tolist() == [1, 3, -1, -1]
