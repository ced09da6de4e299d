"""Trainers of both kinds around a batch of log-probs that a test chooses: the real template and adapters, with the
TransferQueue a dictionary and verl's own update a function that sends back what the loss would.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_rollout_corr.configuration.parser import parse, to_mapping
from verl_rollout_corr.hooks import driver_v0, driver_v1, wire
from verl_rollout_corr.hooks.applied import Applied
from verl_rollout_corr.hooks.proof import Subject, decision_digests
from verl_rollout_corr.hooks.transport import Carried

Rows = list[Tensor]
Loss = Callable[[dict[str, Tensor]], dict[str, Any]]
"""What the actors answer to the columns that they get."""


class Workers:
    """A worker group as far as the hook knows one, in this process."""

    def execute_all_sync(self, method: str, function: Callable[[], Any]) -> list[Any]:
        """What verl's `Worker.execute_func_rank_zero` answers in two actors."""
        assert method == "execute_func_rank_zero"
        return [function(), function()]


def run(mapping: dict[str, Any], **actor: Any) -> Any:
    """verl's whole configuration, as far as the hook reads it."""
    config_json = json.dumps(to_mapping(parse(mapping)))
    return SimpleNamespace(
        algorithm={"rollout_correction": {wire.CONFIG_JSON: config_json}},
        actor_rollout_ref=SimpleNamespace(
            rollout=SimpleNamespace(response_length=8, top_p=1.0, top_k=-1, temperature=1.0, n=2),
            actor=SimpleNamespace(**{"ppo_epochs": 1, "ppo_mini_batch_size": 2} | actor),
        ),
    )


def faithful(columns: dict[str, Tensor]) -> dict[str, Any]:
    """A loss that applies what the trainer decided, on one rank."""
    mask, weights = columns["response_mask"].bool(), columns.get(wire.WEIGHTS)
    keep = columns[wire.KEEP].bool() & mask
    digests = decision_digests(Subject(columns[wire.ROW], columns, 0, columns["old_log_probs"]), keep, weights)
    applied = Applied.to_micro_batch(0, mask, keep, weights, digests=digests)
    return {"actor/" + wire.APPLIED_METRIC: Carried(applied)}


def _padded(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to_padded_tensor(0) if value.is_nested else value for name, value in columns.items()}


class Queue:
    """verl's TransferQueue as a dictionary of columns. It leaves out what it does not have, as the real one does."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self.columns = columns

    def kv_batch_get(self, *, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        """The columns that are there."""
        found = TensorDict({}, batch_size=len(keys))
        for name in select_fields:
            if name in self.columns:
                found[name] = self.columns[name]
        return found

    def kv_batch_put(self, *, keys: list[str], partition_id: str, fields: TensorDict) -> KVBatchMeta:
        """Writes, and describes the batch with what it holds now."""
        self.columns.update(fields.items())
        return KVBatchMeta(
            partition_id=partition_id, keys=keys, tags=[{} for _ in keys], fields=[*self.columns], extra_info={}
        )


def update_v1(
    rows: dict[str, Rows], mapping: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, loss: Loss = faithful
) -> tuple[dict[str, Any], Queue]:
    """One step of PPOTrainerSync on jagged columns: the metrics, and the queue after it."""
    count = len(rows["response_mask"])
    queue = Queue({name: torch.nested.as_nested_tensor(value, layout=torch.jagged) for name, value in rows.items()})
    queue.columns["uid"] = np.array([f"prompt{row // 2}" for row in range(count)], dtype=object)
    monkeypatch.setattr(driver_v1, "tq", queue)
    trainer = object.__new__(PPOTrainerSync)
    trainer.config, trainer.global_steps, trainer.actor_rollout_wg = run(mapping), 1, Workers()

    def original(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        metrics.update(loss(_padded({name: queue.columns[name] for name in batch.fields if name != "uid"})))
        return batch

    batch = KVBatchMeta(
        partition_id="train",
        keys=[f"prompt{row // 2}_{row % 2}_0" for row in range(count)],
        tags=[{"min_global_steps": 0} for _ in range(count)],
        fields=[*queue.columns],
        extra_info={},
    )

    def step(self: Any, metrics: dict[str, Any], timing_raw: Any) -> Any:
        return driver_v1.wrap_update_actor(original)(self, batch, metrics)

    metrics: dict[str, Any] = {}
    driver_v1.wrap_step(step)(trainer, metrics, {})
    return metrics, queue


def update_v0(
    rows: dict[str, Rows], mapping: dict[str, Any], *, loss: Loss = faithful
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """One update of RayPPOTrainer on padded columns: the metrics, and the columns that the actors got."""
    padded = {name: torch.nn.utils.rnn.pad_sequence(value, batch_first=True) for name, value in rows.items()}
    count = len(rows["response_mask"])
    uid = np.array([f"prompt{row // 2}" for row in range(count)], dtype=object)
    batch = DataProto.from_dict(tensors=padded, non_tensors={"uid": uid})
    trainer = object.__new__(RayPPOTrainer)
    trainer.config, trainer.global_steps, trainer.actor_rollout_wg = run(mapping), 1, Workers()
    shipped: dict[str, Tensor] = {}

    def original(self: Any, batch: Any) -> Any:
        shipped.update(batch.batch.items())
        return DataProto(meta_info={"metrics": loss(shipped)})

    output = driver_v0.wrap_update_actor(original)(trainer, batch)
    assert wire.KEEP not in batch.batch, "the trainer's own batch stays as it is"
    return output.meta_info["metrics"], shipped
