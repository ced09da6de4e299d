"""A checkpoint engine over gloo: how the asynchronous trainers hand weights to standalone rollout servers without GPUs.

verl's own backends need CUDA, an NPU or RDMA, and its asynchronous trainers refuse the backend `naive`. Importing this
module registers the backend `gloo`; verl imports it where a run says

    actor_rollout_ref.rollout.checkpoint_engine.backend=gloo
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=verl_rollout_corr.platform.checkpoint_engine

A weight on another device is copied to the host first. On a CPU the import also makes verl's asynchronous trainers keep
a real copy of pi_old (saved_weights.py).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import torch
from torch.distributed import ProcessGroupGloo, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from verl.checkpoint_engine.base import (
    CheckpointEngine,
    CheckpointEngineRegistry,
    TensorMeta,
    merge_weight_chunks,
    split_weight_chunks,
)

from verl_rollout_corr.errors import HookError
from verl_rollout_corr.patching import apply_when_imported
from verl_rollout_corr.platform import saved_weights, shims

apply_when_imported(saved_weights.SHIM, shims.OWNER)

ALIGNMENT = 16
"""Each tensor starts at a multiple of so many bytes in a bucket, since a view as another dtype must be aligned."""


@dataclass(frozen=True)
class Endpoint:
    """The address at which the sender's store listens."""

    host: str
    port: int


@dataclass(frozen=True)
class Bucket:
    """The contents of one broadcast: its length in bytes, where each chunk is, and whether it is the last broadcast."""

    length: int
    chunks: tuple[TensorMeta, ...]
    last: bool

    def to_json(self) -> str:
        """The text for the store. It is JSON, which cannot run code: anyone who can connect can write there."""
        chunks = [vars(meta) | {"dtype": str(meta.dtype).removeprefix("torch.")} for meta in self.chunks]
        return json.dumps({"length": self.length, "chunks": chunks, "last": self.last})

    @classmethod
    def from_json(cls, text: str | bytes) -> Bucket:
        """Raises HookError if the text is not what `to_json` writes."""
        try:
            read = json.loads(text)
            chunks = tuple(TensorMeta(**_typed(meta)) for meta in read["chunks"])
            return cls(int(read["length"]), chunks, bool(read["last"]))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise HookError(
                f"checkpoint engine gloo: found {text[:200]!r} in the sender's store, which describes no bucket "
                f"({error}): something else writes there, or not every process has this version of the package"
            ) from error


def _typed(meta: dict[str, Any]) -> dict[str, Any]:
    dtype = getattr(torch, meta["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{meta['dtype']!r} is not a dtype")
    return meta | {"shape": torch.Size(meta["shape"]), "dtype": dtype}


def _on_host(weights: Iterable[tuple[str, torch.Tensor]]) -> Generator[tuple[str, torch.Tensor], None, None]:
    for name, weight in weights:
        yield name, weight.detach().cpu().contiguous()


@CheckpointEngineRegistry.register("gloo")  # pyright: ignore[reportAttributeAccessIssue] - it is not a static method
class GlooCheckpointEngine(CheckpointEngine):
    """Broadcasts the weights of the trainer's rank 0 to every rollout worker, bucket by bucket, bit for bit.

    The group is built for each update and dropped after it, since replicas may come and go in between. The description
    of a bucket goes through the group's store, its bytes through a broadcast. The other ranks of the trainer are not in
    the group, but they iterate over their weights, because gathering a sharded weight is a collective of all of them.

    Args:
        bucket_size: bytes per broadcast; a bigger tensor is cut.
        is_master: whether this process is the trainer's rank 0.
        timeout_seconds: how long one broadcast may take before it counts as failed
            (`checkpoint_engine.engine_kwargs.gloo.timeout_seconds`).
    """

    def __init__(self, bucket_size: int, is_master: bool = False, timeout_seconds: float = 600.0) -> None:
        if bucket_size < ALIGNMENT:
            raise HookError(
                f"checkpoint_engine.update_weights_bucket_megabytes gives buckets of {bucket_size} bytes; write 1 or "
                "more"
            )
        # A multiple of the alignment, so that a tensor that is cut continues at an aligned offset.
        self.bucket_size = bucket_size // ALIGNMENT * ALIGNMENT
        self.is_master = is_master
        self.timeout = timedelta(seconds=timeout_seconds)
        self.rank = -1
        self._store: TCPStore | None = None
        self._group: ProcessGroupGloo | None = None

    def prepare(self) -> Endpoint | None:
        """Opens the store on the sender, on any free port, and returns its address; None in every other process."""
        if not self.is_master:
            return None
        host = ray.util.get_node_ip_address().strip("[]")
        store = self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=self.timeout)
        return Endpoint(host, store.port)

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Rank 0 is the trainer's rank 0, the rollout workers follow, the trainer's other ranks (-1) stay outside."""
        endpoint = metadata[0]
        if not isinstance(endpoint, Endpoint):
            raise HookError(
                f"checkpoint engine gloo: the trainer's rank 0 opened no store, found {endpoint!r}: it must be the "
                "first worker"
            )
        world_size = rollout_world_size + 1
        trainer = [0] + [-1] * (actor_wg_world_size - 1)
        rollout = list(range(1, world_size))
        trainer_arguments, rollout_arguments = (
            {"rank": ranks, "world_size": [world_size] * len(ranks), "endpoint": [endpoint] * len(ranks)}
            for ranks in (trainer, rollout)
        )
        return trainer_arguments, rollout_arguments

    def init_process_group(self, rank: int, world_size: int, endpoint: Endpoint) -> None:
        """Joins the group; returns when all members have joined. Rank -1 stays outside."""
        self.rank = rank
        if rank < 0:
            return
        if self._store is None:
            self._store = TCPStore(endpoint.host, endpoint.port, is_master=False, timeout=self.timeout)
        self._group = ProcessGroupGloo(self._store, rank, world_size, self.timeout)

    def finalize(self) -> None:
        """Drops the group and the store."""
        self._group = None
        self._store = None
        self.rank = -1

    @torch.no_grad()
    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, Any]:
        """Sends every weight from rank 0. Returns no metrics."""
        if self.rank < 0:
            for _ in weights:
                pass
            return {}
        number = 0
        chunks: list[tuple[TensorMeta, Any]] = []
        filled = 0
        async for meta, chunk in split_weight_chunks(_on_host(weights), self.bucket_size):
            if filled + meta.chunk_size > self.bucket_size:
                await asyncio.to_thread(self._broadcast, number, chunks, filled, False)
                number, chunks, filled = number + 1, [], 0
            meta.offset = filled
            chunks.append((meta, chunk))
            filled += -(-meta.chunk_size // ALIGNMENT) * ALIGNMENT
        await asyncio.to_thread(self._broadcast, number, chunks, filled, True)
        return {}

    @torch.no_grad()
    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yields every weight that rank 0 sends, with its name. Weights of one bucket share memory, and no others."""
        chunks: Any = self._receive_chunks()  # verl declares a generator, and iterates asynchronously
        async for name, weight in merge_weight_chunks(chunks, self.bucket_size):
            yield name, weight

    async def _receive_chunks(self) -> AsyncIterator[Any]:
        number, last = 0, False
        while not last:
            bucket, payload = await asyncio.to_thread(self._receive, number)
            for meta in bucket.chunks:
                yield meta, payload[meta.offset : meta.offset + meta.chunk_size]
            number, last = number + 1, bucket.last

    def _members(self) -> tuple[Any, Any]:
        # torch declares neither that a store takes bytes nor what this group can do.
        if self._store is None or self._group is None:
            raise HookError(
                "checkpoint engine gloo: weights are moved between init_process_group and finalize only, as verl's "
                "CheckpointEngineManager.update_weights does"
            )
        return self._store, self._group

    def _broadcast(self, number: int, chunks: list[tuple[TensorMeta, torch.Tensor]], length: int, last: bool) -> None:
        store, group = self._members()
        payload = torch.zeros(length, dtype=torch.uint8)
        for meta, chunk in chunks:
            payload[meta.offset : meta.offset + meta.chunk_size] = chunk
        store.set(_key(number), Bucket(length, tuple(meta for meta, _ in chunks), last).to_json())
        if length:
            group.broadcast(payload, 0).wait()

    def _receive(self, number: int) -> tuple[Bucket, torch.Tensor]:
        store, group = self._members()
        bucket = Bucket.from_json(store.get(_key(number)))
        # A new buffer each time, because the receiver of the weights may keep views of the previous one.
        payload = torch.empty(bucket.length, dtype=torch.uint8)
        if bucket.length:
            group.broadcast(payload, 0).wait()
        return bucket, payload


def _key(number: int) -> str:
    return f"bucket{number}"
