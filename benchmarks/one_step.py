"""Which files of the package run when verl's V1 trainer makes one step with `k3_rs`: `python one_step.py CHECKOUT`.

Runs in a process of its own, on the package and the tests of that checkout (benchmarks/house.py starts it). verl's
trainer, its policy loss, the hooks and the correction are the real ones. The TransferQueue is a dictionary, the model's
output is given, and nothing of Ray starts. Prints JSON: the files of the functions that are called until the decision
is written into the queue, and until the step has its metrics.
"""

from __future__ import annotations

import json
import sys
import warnings
from types import SimpleNamespace
from typing import Any

CHECKOUT = sys.argv[1]
sys.path.append(f"{CHECKOUT}/tests")
warnings.simplefilter("ignore")

# The imports are those of the checkout, which is known now.
import numpy as np  # noqa: E402
import torch  # noqa: E402
from hooks import direct  # noqa: E402  # pyright: ignore[reportMissingImports]
from hooks.rows import Row  # noqa: E402  # pyright: ignore[reportMissingImports]
from tensordict import TensorDict  # noqa: E402
from transfer_queue import KVBatchMeta  # noqa: E402
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync  # noqa: E402

from verl_rollout_corr import load_preset  # noqa: E402
from verl_rollout_corr.hooks import driver_v1  # noqa: E402

try:
    from verl_rollout_corr.configuration.parser import to_mapping
except ImportError:  # before the package had folders
    from verl_rollout_corr.config import to_mapping  # pyright: ignore[reportMissingImports]

COLUMNS = ("old_log_probs", "rollout_log_probs", "advantages")
KEYS = ["a_0_0", "a_1_0", "b_0_0", "b_1_0"]


class Queue:
    """The TransferQueue: columns by name. `written` is called when the decision arrives."""

    def __init__(self, rows: list[Row], written: Any) -> None:
        self.columns: dict[str, Any] = {
            name: torch.nested.as_nested_tensor([row.columns[name] for row in rows], layout=torch.jagged)
            for name in COLUMNS
        }
        for name, column in (("response_mask", "mask"), ("responses", "response")):
            values = [getattr(row, column) for row in rows]
            self.columns[name] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
        self.columns["uid"] = np.array([key[0] for key in KEYS], dtype=object)
        self.given = set(self.columns)
        self.written = written

    def kv_batch_get(self, *, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        """The columns that are there."""
        found = TensorDict({}, batch_size=len(keys))
        for name in select_fields:
            if name in self.columns:
                found[name] = self.columns[name]
        return found

    def kv_batch_put(self, *, keys: list[str], partition_id: str, fields: TensorDict) -> KVBatchMeta:
        """Takes columns, and describes the batch."""
        self.columns.update(fields.items())
        self.written()
        return description(self)

    def decided(self, rows: list[Row]) -> list[Row]:
        """The rows with the columns that the hook wrote."""
        wrote = {name: column for name, column in self.columns.items() if name not in self.given}
        return [
            row.having(**{n: c.unbind()[at] if c.is_nested else c[at] for n, c in wrote.items()})
            for at, row in enumerate(rows)
        ]


class Workers:
    """The actors: one, in this process."""

    def execute_all_sync(self, method: str, function: Any) -> list[Any]:
        """What verl's worker group answers."""
        return [function()]


def description(queue: Queue) -> KVBatchMeta:
    """What verl's trainer hands around instead of the batch."""
    tags = [{"min_global_steps": 0} for _ in KEYS]
    return KVBatchMeta(partition_id="train", keys=KEYS, tags=tags, fields=[*queue.columns], extra_info={})


def drawn() -> list[Row]:
    """Four rows of 6 to 9 tokens, with log-probs that differ by 1 %."""
    generator = torch.Generator().manual_seed(0)
    rows: list[Row] = []
    for number in range(len(KEYS)):
        tokens = 6 + number
        train = -torch.rand(tokens, generator=generator) - 0.1
        rollout = train + 0.01 * torch.randn(tokens, generator=generator)
        columns = dict(zip(COLUMNS, (train, rollout, torch.full((tokens,), (-1.0) ** number)), strict=True))
        mask = torch.ones(tokens, dtype=torch.int64)
        rows.append(Row(torch.arange(3, 7), torch.arange(3, 3 + tokens), mask, columns))
    return rows


def started(mapping: dict[str, Any]) -> Any:
    """A PPOTrainerSync before its first step."""
    trainer: Any = object.__new__(PPOTrainerSync)
    trainer.global_steps = 1
    trainer.config = SimpleNamespace(
        algorithm={"rollout_correction": {"rollout_corr": json.dumps(mapping)}},
        actor_rollout_ref=SimpleNamespace(
            rollout=SimpleNamespace(response_length=12, top_p=1.0, top_k=-1, temperature=1.0, n=1),
            actor=SimpleNamespace(ppo_epochs=1, ppo_mini_batch_size=len(KEYS)),
        ),
    )
    return trainer


def step(trainer: Any, rows: list[Row], actor: Any, written: Any) -> dict[str, Any]:
    """One step with one update of one micro-batch: its metrics. `actor` is the actor's configuration, which a run
    parses when it starts.
    """
    queue = driver_v1.tq = Queue(rows, written)  # pyright: ignore[reportAttributeAccessIssue]
    trainer.actor_rollout_wg = Workers()  # new ones: `direct.call` says that the update is their first

    def train(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        found = direct.call(actor, queue.decided(rows)).metrics
        metrics.update({f"actor/{name}": value for name, value in found.items()})
        return batch

    def verl_step(self: Any, metrics: dict[str, Any], timing_raw: Any) -> Any:
        return driver_v1.wrap_update_actor(train)(self, description(queue), metrics)

    metrics: dict[str, Any] = {}
    driver_v1.wrap_step(verl_step)(trainer, metrics, {})
    return metrics


def main() -> None:
    """Trace the second step of a trainer, since the first one also fills caches, and checks what a run has once."""
    package = f"{CHECKOUT}/verl_rollout_corr/"
    called: set[str] = set()
    until_written: set[str] = set()

    def look(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package) and not code.co_name.startswith("<"):
            called.add(code.co_filename)

    rows, mapping = drawn(), to_mapping(load_preset("k3_rs"))
    actor = direct.configuration(mapping, SimpleNamespace(setattr=setattr))
    trainer = started(mapping)
    step(trainer, rows, actor, lambda: None)
    sys.setprofile(look)
    metrics = step(trainer, rows, actor, lambda: until_written.update(called))
    sys.setprofile(None)
    assert 0 < metrics["rollout_corr/k3_kl"] < 0.01
    print(json.dumps([sorted(until_written), sorted(called)]))


if __name__ == "__main__":
    main()
