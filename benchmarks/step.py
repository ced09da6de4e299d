"""What the correction adds to a training step of verl's V1 trainer: through a real TransferQueue, part by part.

`python -m benchmarks.step` writes its table into docs/speed.md. The batch is 512 prompts with 16 samples each, with
lengths of mean 10 % of the longest; `--longest 16384` needs about 10 GiB for verl's padded batch.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor
from verl import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.workers.utils.padding import response_to_nested

from benchmarks.contenders import config_of
from benchmarks.correct import machine, table, write
from verl_rollout_corr import finalize
from verl_rollout_corr.hooks import wire
from verl_rollout_corr.hooks.driver import decide_batch
from verl_rollout_corr.hooks.driver_v1 import QueueAdapter
from verl_rollout_corr.hooks.places import padded
from verl_rollout_corr.hooks.proof import Subject, decision_digests
from verl_rollout_corr.kernels import choice
from verl_rollout_corr.maths import correction

PRESET = "k3_rs_token_is"
PARTITION = "train"
_VERL: Any = {"rollout_is": "token", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}


class Clock:
    """Seconds of each part, in the order in which they first ran; of several rounds the median."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Adds one measurement."""
        start = time.perf_counter()
        yield
        self.found.setdefault(name, []).append(time.perf_counter() - start)

    def rows(self) -> list[list[str]]:
        """Cells of a table, the last one the sum of the parts."""
        medians = {name: float(np.median(times)) for name, times in self.found.items()}
        cells = [[name, f"{seconds * 1e3:,.1f}"] for name, seconds in medians.items()]
        return [*cells, ["**together**", f"**{sum(medians.values()) * 1e3:,.1f}**"]]


def columns_of(rows: int, longest: int) -> dict[str, Tensor]:
    """What verl has in the queue when the actor is to be updated, jagged over the responses."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(rows).exponential_(1 / 0.1, generator=generator) * longest
    lengths = lengths.clamp(1, longest).long()
    lengths[0] = longest
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    rollout = -torch.empty(int(offsets[-1])).exponential_(2.0, generator=generator)
    train = -(rollout + 0.03 * torch.randn(len(rollout), generator=generator)).abs()
    signs = torch.randn(rows, generator=generator).repeat_interleave(lengths)
    flat = {
        "response_mask": torch.ones(len(rollout), dtype=torch.int64),
        "rollout_log_probs": rollout,
        "old_log_probs": train,
        "advantages": signs,
        "responses": torch.ones(len(rollout), dtype=torch.int64),
    }
    return {name: torch.nested.nested_tensor_from_jagged(values, offsets) for name, values in flat.items()}


def filled_queue(columns: dict[str, Tensor], prompts: int, samples: int) -> Any:
    """A started queue with these columns, and verl's description of the batch."""
    # The queue's actors ask for a core each, and mostly wait.
    ray.init(num_cpus=max(os.cpu_count() or 1, 8), include_dashboard=False, logging_level=logging.ERROR)
    tq.init()
    keys = [f"prompt{prompt}_{sample}_0" for prompt in range(prompts) for sample in range(samples)]
    uids = np.repeat([f"prompt{prompt}" for prompt in range(prompts)], samples)
    fields = TensorDict({**columns}, batch_size=len(keys))
    fields["uid"] = np.array(uids, dtype=object)
    tags = [{"min_global_steps": 0} for _ in keys]
    return tq.kv_batch_put(keys=keys, partition_id=PARTITION, fields=fields, tags=tags)


def our_step(batch: Any, maths: Callable[..., Any], clock: Clock) -> None:
    """The hook's way: fetch, correct, put back, and what the workers fetch and read of it."""
    config = config_of(PRESET)
    adapter = QueueAdapter(lambda *_: None, SimpleNamespace(), batch, {})
    with clock.part("fetch the columns"):
        fetched = adapter.fetch()
    rows = torch.arange(len(batch))
    with clock.part("correct"):
        given = (fetched.columns["old_log_probs"], fetched.rollout_log_probs, fetched.response_mask)
        result = maths(*given, config, staleness=torch.zeros_like(rows))
    with clock.part("digest of the decision"):
        subject = Subject(rows, fetched.columns, 0, fetched.rollout_log_probs)
        digests = decision_digests(subject, result.keep, result.weights)
    with clock.part("metrics"):
        finalize(result.sums)
    columns = {wire.KEEP: result.keep, wire.WEIGHTS: result.weights, wire.ROW: rows, wire.DIGEST: digests}
    with clock.part("put the decision"):
        adapter.ship(columns, {})
    _read(batch, [wire.KEEP, wire.WEIGHTS, wire.ROW, wire.DIGEST], clock)


def verls_step(batch: Any, clock: Clock) -> None:
    """Verl's own correction in `_compute_advantage`, which fetches and pads the columns for the advantages anyway."""
    with clock.part("fetch the columns"):
        names = ["response_mask", "rollout_log_probs", "old_log_probs"]
        fetched = tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION, select_fields=names)
    mask = fetched["response_mask"]
    with clock.part("pad them"):
        data = DataProto(batch=fetched.to_padded_tensor())
    with clock.part("correct"):
        data, _ = compute_rollout_correction_and_add_to_batch(data, _VERL)
    with clock.part("nest the answer"):
        names = ["response_mask", "rollout_is_weights"]
        answer = {name: response_to_nested(data.batch[name], mask) for name in names}
    with clock.part("put the decision"):
        fields = {f"verl_{name}": values for name, values in answer.items()}  # the next round needs the mask as it was
        tq.kv_batch_put(keys=batch.keys, partition_id=PARTITION, fields=TensorDict(fields, batch_size=len(batch)))
    _read(batch, [f"verl_{name}" for name in names], clock)


def _read(batch: Any, names: list[str], clock: Clock, micro: int = 256) -> None:
    """What workers fetch, and pad for the loss, micro-batch by micro-batch; one worker reads all of them here."""
    with clock.part("workers fetch it"):
        found = [
            tq.kv_batch_get(keys=batch.keys[at : at + micro], partition_id=PARTITION, select_fields=names)
            for at in range(0, len(batch.keys), micro)
        ]
    with clock.part("workers pad it"):
        for part in found:
            padded(part, tuple(names))


def same_decision(batch: Any) -> None:
    """The parts above are what the hook runs: `decide_batch` ships the same columns."""
    fetched = QueueAdapter(lambda *_: None, SimpleNamespace(), batch, {}).fetch()
    lags = torch.zeros(len(batch), dtype=torch.int64)
    decided = decide_batch(fetched, config_of(PRESET), lags).columns
    found = tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION, select_fields=[wire.KEEP, wire.DIGEST])
    if not torch.equal(decided[wire.DIGEST], found[wire.DIGEST]):
        raise SystemExit("what was measured is not what the hook decides")


def main() -> None:
    """Measures, prints, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--longest", type=int, default=4096, help="the longest response; the mean is a tenth of it")
    parser.add_argument("--rounds", type=int, default=3, help="of which the first is not counted")
    parser.add_argument("--print-only", action="store_true", help="leave docs/speed.md as it is")
    options = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    warnings.simplefilter("ignore")
    columns = columns_of(options.prompts * options.samples, options.longest)
    tokens = columns["response_mask"].values().numel()
    batch = filled_queue(columns, options.prompts, options.samples)
    contenders: dict[str, Callable[[Clock], None]] = {
        "ours": lambda clock: our_step(batch, choice.correct, clock),
        "ours, by the definition": lambda clock: our_step(batch, correction.correct, clock),
        "verl's helper": lambda clock: verls_step(batch, clock),
    }
    tables: list[str] = []
    for name, step in contenders.items():
        clock = Clock()
        for number in range(options.rounds):
            step(clock if number else Clock())
        if name == "ours":
            same_decision(batch)
        tables.append(table(name.capitalize(), "part", clock.rows(), ["ms"]))
        print(tables[-1], flush=True)
    tq.close()
    ray.shutdown()
    head = (
        f"{options.prompts} prompts with {options.samples} samples, {tokens:,} response tokens, the longest "
        f"{options.longest:,}, `{PRESET}`. {machine('step')}\n"
    )
    print(head)
    if not options.print_only:
        write(head + "\n" + "\n".join(tables), "step")


if __name__ == "__main__":
    main()
