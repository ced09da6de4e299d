"""One update of the V1 trainer through a real TransferQueue, timed part by part; a process of `benchmarks.step`.

What runs is verl's own `_update_actor`, with or without the hook around it, and verl's own loss with or without the
hook in front of it. The workers are a stand-in at the very end: they fetch their rows from the queue and call the loss
on log-probs that are already there, because no model can run such a batch on a CPU. One of them does the work of all.

Nothing of the package is imported but the hook's modules, so that the same file measures an older checkout:
`PYTHONPATH=CHECKOUT python benchmarks/step_update.py ...`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch import Tensor
from verl import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils import losses
from verl.workers.utils.padding import response_to_nested

PRESET: dict[str, Any] = {
    "weights": {"level": "token", "upper": 2.0},
    "reject": {"seq_mean_k3": {"upper": 0.01}},
}
"""`k3_rs_token_is`."""

_VERL: Any = {"rollout_is": "token", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
PARTITION = "train"
MICRO_BATCH = 256
_FETCHES = {"trainer": "the trainer fetches columns", "worker": "the workers fetch their rows"}


class Clock:
    """Seconds of each part. Parts do not overlap: inside a part, others are not measured."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.side = "trainer"
        self._inside = False

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measures a part of the step."""
        if self._inside:
            yield
            return
        self._inside, start = True, time.perf_counter()
        try:
            yield
        finally:
            self._inside = False
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def around(self, function: Callable[..., Any], name: str | None = None) -> Callable[..., Any]:
        """The function, measured; without a name as a fetch of whoever calls it."""

        def measured(*positional: Any, **named: Any) -> Any:
            with self.part(name or _FETCHES[self.side]):
                return function(*positional, **named)

        return measured


def columns_of(rows: int, longest: int) -> dict[str, Tensor]:
    """What verl has in the queue when the actor is to be updated, jagged over the responses, whose mean length is a
    tenth of the longest; prompts have one token.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(rows).exponential_(1 / 0.1, generator=generator) * longest
    lengths = lengths.clamp(1, longest).long()
    lengths[0] = longest
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    rollout = -torch.empty(int(offsets[-1])).exponential_(2.0, generator=generator)
    train = -(rollout + 0.03 * torch.randn(len(rollout), generator=generator)).abs()
    flat = {
        "responses": torch.zeros(len(rollout), dtype=torch.int64),
        "response_mask": torch.ones(len(rollout), dtype=torch.int64),
        "rollout_log_probs": rollout,
        "old_log_probs": train,
        "advantages": torch.randn(rows, generator=generator).repeat_interleave(lengths),
    }
    columns = {name: torch.nested.nested_tensor_from_jagged(values, offsets) for name, values in flat.items()}
    one = torch.zeros(rows, dtype=torch.int64)
    columns["prompts"] = torch.nested.nested_tensor_from_jagged(one, torch.arange(rows + 1))
    ids = torch.zeros(len(rollout) + rows, dtype=torch.int64)
    columns["input_ids"] = torch.nested.nested_tensor_from_jagged(ids, offsets + torch.arange(rows + 1))
    return columns


def filled_queue(columns: dict[str, Tensor], prompts: int, samples: int) -> Any:
    """A started queue with these columns, and verl's description of the batch."""
    # The queue's actors ask for a core each, and mostly wait.
    ray.init(num_cpus=max(os.cpu_count() or 1, 8), include_dashboard=False, logging_level=logging.ERROR)
    tq.init()
    keys = [f"prompt{prompt}_{sample}_0" for prompt in range(prompts) for sample in range(samples)]
    fields = TensorDict({**columns}, batch_size=len(keys))
    fields["uid"] = np.array(np.repeat([f"prompt{prompt}" for prompt in range(prompts)], samples), dtype=object)
    tags = [{"min_global_steps": 0} for _ in keys]
    return tq.kv_batch_put(keys=keys, partition_id=PARTITION, fields=fields, tags=tags)


class Workers:
    """A worker group as far as `_update_actor` and the hook know one."""

    def __init__(self, actor: Any, loss: Callable[..., Any], names: list[str], clock: Clock) -> None:
        self.actor, self.loss, self.names, self.clock = actor, loss, names, clock

    def execute_all_sync(self, method: str, function: Callable[[], Any]) -> list[Any]:
        """What an actor answers to the question which code it runs."""
        return [function()]

    def update_actor(self, batch: Any) -> dict[str, Any]:
        """The loss and its gradient of every micro-batch, and what verl returns of them."""
        self.clock.side = "worker"
        collected: dict[str, list[Any]] = {"mfu": [0.0]}
        # A worker fetches what the description of the batch names; `names` are the columns that verl's own loss reads.
        added = [name for name in batch.fields if name.startswith("rollout_corr") or name == "rollout_is_weights"]
        for at in range(0, len(batch.keys), MICRO_BATCH):
            keys = batch.keys[at : at + MICRO_BATCH]
            data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=[*self.names, *added])
            tokens = int(data["response_mask"].values().sum())
            beside = {name: value for name, value in batch.extra_info.items() if name.startswith("rollout_corr")}
            tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens, global_batch_size=len(keys), **beside)
            output, leaf = self._forward(data)
            with self.clock.part("the loss and its gradient"):
                loss, metrics = self.loss(config=self.actor, model_output=output, data=data, dp_group=None)
                loss.backward()
            assert leaf.grad is not None
            for name, value in metrics.items():
                if name.startswith("rollout_corr"):
                    collected.setdefault(name, []).append(value)
        self.clock.side = "trainer"
        return {"metrics": collected}

    def _forward(self, data: Any) -> tuple[dict[str, Tensor], Tensor]:
        """In place of a model: the log-prob of each token at the position before it, as the model's output has it."""
        old = data["old_log_probs"]
        lengths = old.offsets().diff() + 1
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        flat = torch.full((int(offsets[-1]),), -1.0)
        last = torch.zeros(len(flat), dtype=torch.bool)
        last[offsets[1:] - 1] = True
        flat[~last] = old.values()
        leaf = flat.requires_grad_()
        return {"log_probs": torch.nested.nested_tensor_from_jagged(leaf, offsets)}, leaf


_COLUMNS = ["input_ids", "prompts", "responses", "response_mask", "old_log_probs", "advantages"]


def actor_config(policy_loss: Any) -> Any:
    """verl's configuration of the actor."""
    return FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=policy_loss)


def trainer_of(corrected: bool, longest: int, rows: int) -> Any:
    """A trainer without a run around it."""
    trainer = object.__new__(PPOTrainerSync)
    node = {"rollout_corr": json.dumps(PRESET)} if corrected else None
    actor = {
        "ppo_mini_batch_size": rows,
        "ppo_epochs": 1,
        "calculate_entropy": False,
        "entropy_coeff": 0.0,
        "data_loader_seed": 0,
        "shuffle": False,
    }
    rollout = {"n": 1, "temperature": 1.0, "response_length": longest, "top_p": 1.0, "top_k": -1}
    trainer.config = OmegaConf.create(
        {"algorithm": {"rollout_correction": node}, "actor_rollout_ref": {"actor": actor, "rollout": rollout}}
    )
    trainer.global_steps = 1
    return trainer


def with_hook(batch: Any, longest: int, clock: Clock, definition: bool) -> Callable[[], Any]:
    """`_update_actor` in a run with the preset."""
    hooks = {name: importlib.import_module(f"verl_rollout_corr.hooks.{name}") for name in _HOOKS}
    driver: Any = hooks["driver"]
    policy_loss, original = hooks["policy_loss"], PPOTrainerSync._update_actor
    corrects = importlib.import_module("verl_rollout_corr.maths.correction").correct if definition else driver.correct
    driver.correct = clock.around(corrects, "the correction")
    if hasattr(driver, "as_written"):
        driver.as_written.check = lambda who: None  # it would refuse the clock
    trainer = trainer_of(True, longest, len(batch))
    # verl's own, if building the configuration has put the hook around it.
    node = policy_loss.RolloutCorrPolicyLossConfig(loss_mode="vanilla", rollout_corr=json.dumps(PRESET))
    loss = hooks["worker"].wrap_ppo_loss(getattr(losses.ppo_loss, "__wrapped__", losses.ppo_loss))
    trainer.actor_rollout_wg = Workers(actor_config(node), _in_a_mini_batch(loss), _COLUMNS, clock)
    update = hooks["driver_v1"].wrap_update_actor(getattr(original, "__wrapped__", original))
    return lambda: update(trainer, batch, {})


def _in_a_mini_batch(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The hook's loss as it runs in verl's `train_batch`; older hooks do not ask where they run."""
    try:
        opened = importlib.import_module("verl_rollout_corr.hooks.ledger").opened
    except (ModuleNotFoundError, AttributeError):
        opened = nullcontext

    def inside(**given: Any) -> Any:
        with opened():
            return loss(**given)

    return inside


_HOOKS = ("driver", "driver_v1", "worker", "policy_loss")


def without_hook(batch: Any, longest: int, clock: Clock, verls_own: bool) -> Callable[[], Any]:
    """Verl's `_update_actor`, alone or after verl's own correction, which runs before the advantages."""
    trainer = trainer_of(False, longest, len(batch))
    actor = actor_config(PolicyLossConfig(loss_mode="vanilla"))
    trainer.actor_rollout_wg = Workers(actor, losses.ppo_loss, _COLUMNS, clock)

    def update() -> Any:
        described = _corrected_by_verl(batch, clock) if verls_own else batch
        return PPOTrainerSync._update_actor(trainer, described, {})

    return update


def _corrected_by_verl(batch: Any, clock: Clock) -> Any:
    """As in verl's `_compute_advantage`, which has fetched and padded the columns for the advantages already."""
    names = ["response_mask", "rollout_log_probs", "old_log_probs"]
    fetched = tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION, select_fields=names)
    mask = fetched["response_mask"]
    with clock.part("padding and nesting"):
        data = DataProto(batch=fetched.to_padded_tensor())
    with clock.part("the correction"):
        data, _ = compute_rollout_correction_and_add_to_batch(data, _VERL)
    with clock.part("padding and nesting"):
        fields = {"rollout_is_weights": response_to_nested(data.batch["rollout_is_weights"], mask)}
        # verl writes the rejection into the mask; under a name of its own here, so that every round finds the same.
        fields["rollout_corr_mask"] = response_to_nested(data.batch["response_mask"], mask)
    return tq.kv_batch_put(
        keys=batch.keys, partition_id=PARTITION, fields=TensorDict(fields, batch_size=len(batch.keys))
    )


CONTENDERS: dict[str, Callable[..., Callable[[], Any]]] = {
    "verl": lambda *given: without_hook(*given, verls_own=False),
    "helper": lambda *given: without_hook(*given, verls_own=True),
    "hook": lambda *given: with_hook(*given, definition=False),
    "definition": lambda *given: with_hook(*given, definition=True),
}
"""verl alone; with its own correction; with the hook; with the hook and the definition instead of the fast kernels."""


def main() -> None:
    """Prints the seconds of each part, the median of the rounds, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--prompts", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--longest", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True, help="of which the first is not counted")
    options = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    warnings.simplefilter("ignore")
    columns = columns_of(options.prompts * options.samples, options.longest)
    tokens = columns["response_mask"].values().numel()
    batch = filled_queue(columns, options.prompts, options.samples)
    clock = Clock()
    tq.kv_batch_get, tq.kv_batch_put = (
        clock.around(tq.kv_batch_get),
        clock.around(tq.kv_batch_put, "the decision is put"),
    )
    update = CONTENDERS[options.contender](batch, options.longest, clock)
    rounds: list[dict[str, float]] = []
    for _ in range(options.rounds):
        clock.seconds, start = {}, time.perf_counter()
        update()
        whole = time.perf_counter() - start
        rounds.append({**clock.seconds, "everything else": whole - sum(clock.seconds.values()), "together": whole})
    counted = rounds[1:] or rounds
    parts = {name: float(np.median([found.get(name, 0.0) for found in counted])) for name in counted[0]}
    tq.close()
    ray.shutdown()
    print(json.dumps({"tokens": tokens, "parts": parts}))


if __name__ == "__main__":
    main()
