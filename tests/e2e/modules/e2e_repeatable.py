"""Makes two runs of verl's V1 trainer train on the same samples in the same order.

verl names prompts at random and takes samples in the order in which they are finished. Here a prompt has a number and
the batch is sorted. The recipe gives each sample a seed of its own; the engine's arithmetic still depends on what it
computes together: use it with rollout.max_num_seqs=1.
"""

from __future__ import annotations

import itertools
import uuid
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


after_import("verl.trainer.ppo.v1.trainer_base", _count_prompts)
after_import("verl.trainer.ppo.v1.replay_buffer", _sort_batches)
