"""The checkpoint engine `gloo` with verl's own calls in verl's order: prepare, topology, group, update, finalize,
again and again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry

from verl_rollout_corr.errors import HookError
from verl_rollout_corr.platform.checkpoint_engine import ALIGNMENT, Endpoint, GlooCheckpointEngine

BUCKET = 256
Weights = list[tuple[str, torch.Tensor]]


def weights(seed: int) -> Weights:
    """Every kind that a model has, some bigger than a bucket, some that leave the next one at an odd offset."""
    drawn = torch.Generator().manual_seed(seed)
    return [
        ("big", torch.randn(37, 11, generator=drawn)),
        ("odd.bf16", torch.randn(3, generator=drawn).bfloat16()),
        ("scalar.f64", torch.randn((), generator=drawn, dtype=torch.float64)),
        ("flags", torch.rand(5, generator=drawn) < 0.5),
        ("transposed", torch.randn(4, 6, generator=drawn).t()),
        ("counts", torch.randint(0, 9, (7,), generator=drawn)),
        ("exactly_a_bucket", torch.randn(BUCKET // 4, generator=drawn)),
        ("biggest.bf16", torch.randn(1000, generator=drawn).bfloat16()),
    ]


class Deployment:
    """Ranks of a trainer and workers of rollout replicas, each in a thread, driven as CheckpointEngineManager drives
    them.
    """

    def __init__(self, trainers: int, rollouts: int, bucket: int = BUCKET) -> None:
        self.trainers = [
            GlooCheckpointEngine(bucket, is_master=rank == 0, timeout_seconds=60) for rank in range(trainers)
        ]
        self.rollouts = [GlooCheckpointEngine(bucket, timeout_seconds=60) for _ in range(rollouts)]
        self.walked = 0
        self._lock = threading.Lock()

    def _together(self, calls: list[Any]) -> list[Any]:
        with ThreadPoolExecutor(len(calls)) as pool:
            futures = [pool.submit(call) for call in calls]
            return [future.result(timeout=60) for future in futures]

    def _walk(self, sent: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in sent:
            with self._lock:
                self.walked += 1
            yield name, weight

    def update(self, sent: Weights) -> list[Weights]:
        """One update; what each rollout worker received."""
        engines = self.trainers + self.rollouts
        metadata = [engine.prepare() for engine in engines]
        topology = GlooCheckpointEngine.build_topology(len(self.trainers), len(self.rollouts), metadata)
        arguments = [
            {key: values[i] for key, values in kwargs.items()}
            for kwargs, members in zip(topology, (self.trainers, self.rollouts), strict=True)
            for i in range(len(members))
        ]
        self._together(
            [
                lambda e=engine, kw=kwargs: e.init_process_group(**kw)
                for engine, kwargs in zip(engines, arguments, strict=True)
            ]
        )

        async def received(engine: GlooCheckpointEngine) -> Weights:
            return [(name, weight) async for name, weight in engine.receive_weights(global_steps=1)]

        answers = self._together(
            [lambda e=engine: asyncio.run(e.send_weights(self._walk(sent), global_steps=1)) for engine in self.trainers]
            + [lambda e=engine: asyncio.run(received(e)) for engine in self.rollouts]
        )
        for engine in engines:
            engine.finalize()
        return answers[len(self.trainers) :]


def same(found: Weights, sent: Weights) -> None:
    assert [name for name, _ in found] == [name for name, _ in sent]
    for (name, got), (_, expected) in zip(found, sent, strict=True):
        assert got.dtype == expected.dtype, name
        assert got.shape == expected.shape, name
        assert torch.equal(got, expected), name


@pytest.mark.parametrize(("trainers", "rollouts"), [(1, 1), (2, 1), (1, 3)])
def test_every_worker_receives_every_bit(trainers: int, rollouts: int) -> None:
    deployment = Deployment(trainers, rollouts)
    for round_ in range(3):
        sent = weights(round_)
        received = deployment.update(sent)
        assert len(received) == rollouts
        for found in received:
            same(found, sent)
    assert deployment.walked == 3 * trainers * len(weights(0)), (
        "a rank that sends nothing must walk through its weights"
    )


@pytest.mark.parametrize("bucket", [ALIGNMENT, 100, 1 << 20])
def test_any_size_of_bucket(bucket: int) -> None:
    sent = weights(5)
    (found,) = Deployment(1, 1, bucket).update(sent)
    same(found, sent)


def test_what_was_received_outlives_its_bucket() -> None:
    """vLLM's loader keeps references while the next buckets arrive."""
    sent = [(f"w{i}", torch.full((BUCKET // 8,), float(i))) for i in range(20)]
    (found,) = Deployment(1, 1).update(sent)
    same(found, sent)


def test_verl_finds_it_under_its_name() -> None:
    assert CheckpointEngineRegistry.get("gloo") is GlooCheckpointEngine
    engine = CheckpointEngineRegistry.new("gloo", bucket_size=1 << 20, is_master=False, timeout_seconds=5)
    assert engine.wire_format == "named_tensors"
    assert engine.prepare() is None


def test_topology_counts_every_worker_once() -> None:
    endpoint = Endpoint("host", 1)
    trainer, rollout = GlooCheckpointEngine.build_topology(3, 2, [endpoint, None, None, None, None])
    assert trainer == {"rank": [0, -1, -1], "world_size": [3] * 3, "endpoint": [endpoint] * 3}
    assert rollout == {"rank": [1, 2], "world_size": [3] * 2, "endpoint": [endpoint] * 2}


def test_a_trainer_without_a_store_is_an_error() -> None:
    with pytest.raises(HookError, match="rank 0 opened no store"):
        GlooCheckpointEngine.build_topology(1, 1, [None, None])


def test_weights_outside_an_update_are_an_error() -> None:
    engine = GlooCheckpointEngine(BUCKET, is_master=True)
    engine.rank = 0
    with pytest.raises(HookError, match="between init_process_group and finalize"):
        asyncio.run(engine.send_weights(iter(weights(0))))


def test_a_bucket_that_holds_nothing_is_an_error() -> None:
    with pytest.raises(HookError, match="update_weights_bucket_megabytes"):
        GlooCheckpointEngine(0)


def test_a_receiver_that_dies_fails_the_sender() -> None:
    """Not for ever silent: the sender's broadcast ends with an error, and with it the run."""
    sender = GlooCheckpointEngine(BUCKET, is_master=True, timeout_seconds=3)
    endpoint = sender.prepare()
    assert endpoint is not None
    receiver = GlooCheckpointEngine(BUCKET, timeout_seconds=3)
    joining = threading.Thread(target=receiver.init_process_group, args=(1, 2, endpoint))
    joining.start()
    sender.init_process_group(0, 2, endpoint)
    joining.join()
    receiver.finalize()
    with pytest.raises(RuntimeError):
        asyncio.run(sender.send_weights(iter(weights(0))))
