"""Makes two runs of verl's V1 trainer sample the same tokens in the same order.

verl names prompts at random, takes samples in the order in which they are finished, and lets the engine draw from one
generator for all of them. Here a prompt has a number, the batch is sorted, and each sample has a seed of its own. The
engine's arithmetic still depends on what it computes together: use it with rollout.max_num_seqs=1.
"""

from __future__ import annotations

import itertools
import uuid
import zlib
from types import ModuleType, SimpleNamespace
from typing import Any

from e2e_after_import import after_import


def _count_prompts(trainer: ModuleType) -> None:
    counter = itertools.count(1)
    trainer.uuid = SimpleNamespace(uuid4=lambda: uuid.UUID(int=next(counter)))  # type: ignore[attr-defined]


def _sort_batches(replay: ModuleType) -> None:
    original = replay.ReplayBuffer._materialize_batch

    def _materialize_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = original(self, *args, **kwargs)
        pairs = sorted(zip(batch.keys, batch.tags, strict=True), key=lambda pair: pair[0])
        batch.keys, batch.tags = [key for key, _ in pairs], [tag for _, tag in pairs]
        return batch

    replay.ReplayBuffer._materialize_batch = _materialize_batch


def _seed_samples(agent: ModuleType) -> None:
    original = agent.AgentLoopWorkerTQ._run_agent_loop

    async def _run_agent_loop(self: Any, sampling_params: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        name = f"{kwargs['uid']}/{kwargs['session_id']}/{kwargs.get('global_steps')}"
        seeded = {**sampling_params, "seed": zlib.crc32(name.encode())}
        return await original(self, seeded, *args, **kwargs)

    agent.AgentLoopWorkerTQ._run_agent_loop = _run_agent_loop


after_import("verl.trainer.ppo.v1.trainer_base", _count_prompts)
after_import("verl.trainer.ppo.v1.replay_buffer", _sort_batches)
after_import("verl.trainer.ppo.v1.agent_loop_tq", _seed_samples)
