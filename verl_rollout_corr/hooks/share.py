"""What reaches the actors of an update is what the trainer sent, before the first of them trains: decided with their
configuration, every row on some rank, none twice, and none of another update.

Row by row the loss compares what arrived with what was decided (`ledger.py`). It cannot see a row that did not arrive.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from verl_rollout_corr.configuration.parser import to_mapping
from verl_rollout_corr.errors import HookError
from verl_rollout_corr.grammar import RolloutCorrConfig
from verl_rollout_corr.hooks import as_written, wire
from verl_rollout_corr.hooks.configured import config_of_actor
from verl_rollout_corr.hooks.tables import check_tables, tables

_NOT_A_DECISION = ("presets", "dump")
"""Keys that two configurations with the same decisions may differ in."""

ACTOR = "this actor"
"""What an error calls the process of an actor."""

_STOPPED = "The run stops before it trains on this update"


_TOLD: Mapping[str, Callable[[Any, Any], Any]] = {
    "temperature": lambda actor, rollout: rollout.temperature,
    "epochs": lambda actor, rollout: actor.ppo_epochs,
    "global_batch_size": lambda actor, rollout: actor.ppo_mini_batch_size * rollout.n,
    "mini_batch_size": lambda actor, rollout: actor.ppo_mini_batch_size * rollout.n,
}
"""What verl's trainers send to their actors beside a batch, by its name there, from the configuration of the run: what
pi is computed with, how often a row is trained on, and what the means of the loss divide by.
"""


def sent_along(config: RolloutCorrConfig, digests: Tensor, update: int, run: Any) -> dict[str, Any]:
    """What the trainer sends beside the columns: `digests` (B,) are those of all rows, `run` is verl's configuration
    `actor_rollout_ref`.
    """
    told = {name: of(run.actor, run.rollout) for name, of in _TOLD.items()}
    return {
        wire.UPDATE: update,
        wire.TABLES: json.dumps(dict(tables())),
        wire.TRAINED_WITH: json.dumps(told),
        wire.BATCH_DIGEST: int(digests.sum()),
        wire.DECIDED_WITH: json.dumps(_decides(config), sort_keys=True),
    }


@functools.lru_cache(maxsize=8)
def _decides(config: RolloutCorrConfig) -> dict[str, Any]:
    return {key: value for key, value in to_mapping(config).items() if key not in _NOT_A_DECISION}


def update_of(data: Any) -> int:
    """The number of the update that a batch belongs to. Raises HookError if its trainer did not say."""
    return int(_along(data, wire.UPDATE))


def _along(data: Any, name: str) -> Any:
    found = tu.get_non_tensor_data(data=data, key=name, default=None)
    return _said(found, name)


def _said(found: Any, name: str) -> Any:
    if found is None:
        raise HookError(
            f"rollout_corr: the actor's batch does not say {name}, so the trainer's process did not correct it: the "
            "plug-in is not installed or not loaded there (VERL_USE_EXTERNAL_PLUGINS?), or the trainer is not supported"
        )
    return found


class Share:
    """The rows of one rank in an update, each as often as it is to be trained on.

    `digest` is that of these rows, a scalar tensor; `whole` is the digest of all rows, as the trainer sent it.
    """

    def __init__(self, rows: list[int], epochs: int, digest: Tensor, whole: int) -> None:
        self._left = Counter({row: count * epochs for row, count in Counter(rows).items()})
        self._epochs = epochs
        self._digest, self._whole = digest, whole
        self._is_confirmed = False

    def confirm(self, worker: Any) -> None:
        """Before the first mini-batch: raises HookError, on all ranks together, unless they have the update's rows.

        One number is added over the ranks, once per update and outside of the loss. It is done in `train_batch`, behind
        verl's own exchange of this mini-batch: a rank on which something has put verl's `train_mini_batch` back comes
        that far as well, and stops there, so that no rank waits for it in another exchange.
        """
        if self._is_confirmed:
            return
        self._is_confirmed = True
        found = self._digest[None].to(worker.device_name)
        group = worker.engine.get_data_parallel_group()
        if group is not None:  # torchtitan has none where one rank's share is the whole batch
            torch.distributed.all_reduce(found, group=group)
        if int(found) != self._whole:
            raise HookError(
                "rollout_corr: the rows that reached the actors of all ranks are not those of the update that the "
                f"trainer decided on: rows are missing, came twice, or are those of another update. {_STOPPED}"
            )

    def take(self, rows: list[int]) -> None:
        """A mini-batch of these rows is about to be trained on."""
        self._left.subtract(rows)
        often = [row for row in rows if self._left[row] < 0]
        if often:
            raise HookError(
                f"rollout_corr: row {often[0]} of the trainer's batch comes more than {self._epochs} times in an "
                f"update of {self._epochs} epochs, in the place of another one: the mini-batches were changed on their "
                "way. The run stops before the optimiser steps on it"
            )

    def check_finished(self) -> None:
        """Raises HookError if rows were left out."""
        missing = sorted(row for row, count in self._left.items() if count > 0)
        if missing:
            raise HookError(
                f"rollout_corr: {len(missing)} rows of the trainer's batch, the first of them row {missing[0]}, "
                "reached this actor and were in too few of the mini-batches that it trained on: something left them out"
            )


_open: list[Share] = []


def current_share() -> Share:
    """That of the update which this process is in. Raises HookError if nothing has looked at what arrived."""
    if not _open:
        raise HookError(
            "rollout_corr: a mini-batch is to be trained on outside of the train_mini_batch that compares what arrived "
            "with what was sent: something has put another function in the place of "
            f"verl.workers.engine_workers.TrainingWorker.train_mini_batch. {_STOPPED}"
        )
    return _open[-1]


def wrap_train_mini_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around an update of the actor: what arrived is compared with what was sent before anything is trained on."""

    @functools.wraps(original)
    def train_mini_batch(self: Any, data: Any) -> Any:
        if _is_corrected(data):
            as_written.check(ACTOR)
        config = config_of_worker(self, data)
        if config is None:
            return original(self, data)
        rows, digests = (_said(data.get(name, None), name) for name in (wire.ROW, wire.DIGEST))
        _check_config(config, _along(data, wire.DECIDED_WITH))
        check_tables(ACTOR, json.loads(_along(data, wire.TABLES)))
        _check_told(data)
        _check_new(self, update_of(data))
        epochs = tu.get(data, key="epochs", default=1)
        with sharing(Share(rows.tolist(), epochs, digests.sum(), _along(data, wire.BATCH_DIGEST))):
            return original(self, data)

    return train_mini_batch


@contextmanager
def sharing(share: Share) -> Iterator[None]:
    """While an update trains on these rows."""
    _open.append(share)
    try:
        yield
    finally:
        _open.pop()
    share.check_finished()


def config_of_worker(worker: Any, data: Any) -> RolloutCorrConfig | None:
    """Our configuration in the loss that this worker holds, or None where it has none and is not to have any.

    Raises HookError if the worker got a corrected batch, and its loss is one that the correction knows nothing of.
    """
    actor = getattr(worker.loss_fn, "keywords", {}).get("config")
    config = None if actor is None else config_of_actor(actor)
    if config is None and _is_corrected(data):
        raise HookError(
            f"rollout_corr: this worker was given a corrected batch, and its loss is {worker.loss_fn!r}, without the "
            "correction in front of it and without its configuration: something has replaced the actor's loss. "
            f"{_STOPPED}"
        )
    return config


def _is_corrected(data: Any) -> bool:
    # V1 hands a critic the description of its batch, which has no columns.
    return isinstance(data, TensorDict) and wire.DIGEST in data


def _check_config(config: RolloutCorrConfig, trainers: str) -> None:
    expected, found = json.loads(trainers), json.loads(json.dumps(_decides(config)))
    different = [key for key in {**expected, **found} if expected.get(key) != found.get(key)]
    if different:
        key = different[0]
        raise HookError(
            f"rollout_corr: this actor has rollout_corr.{key}={found.get(key)}, and the trainer "
            f"{expected.get(key)}: one of them was changed after the run was composed. {_STOPPED}"
        )


def _check_told(data: Any) -> None:
    for name, expected in json.loads(_along(data, wire.TRAINED_WITH)).items():
        found = tu.get(data, key=name, default=None)
        if found != expected:
            raise HookError(
                f"rollout_corr: this actor is to train with {name}={found}, and the trainer's configuration says "
                f"{expected}: it was changed on its way. {_STOPPED}"
            )


def _check_new(worker: Any, update: int) -> None:
    """Updates are counted in the trainer, which starts and ends with its actors."""
    last = getattr(worker, "rollout_corr_update", -1)
    if update <= last:
        raise HookError(
            f"rollout_corr: update {update} of the trainer reached this actor after update {last}: what arrived is not "
            f"the batch that the trainer has just decided on. {_STOPPED}"
        )
    worker.rollout_corr_update = update
