"""The replacements of `VERL_CPU_REPEATABLE=1`: a synchronous run is the same to the bit each time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from verl_rollout_corr.platform import environment


def requests_per_server(config: Any) -> int:
    """Requests of a step that each server gets: prompts × samples / servers; 0 where they cannot be shared equally.

    verl's router sends a request to a server with the fewest, so that they share equally while none is answered.
    """
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    ranks = trainer.nnodes * trainer.n_gpus_per_node
    servers = ranks // (
        rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    )
    requests = config.data.train_batch_size * rollout.n
    return requests // servers if servers and requests % servers == 0 else 0


def batches_in_order(original: Callable[..., Any]) -> Callable[..., Any]:
    """Sorts the rows of V1's batches by sample, with VERL_CPU_REPEATABLE=1.

    Needed by verl/trainer/ppo/v1/replay_buffer.py, _materialize_batch, which takes rows in the order in which they were
    finished, and prompts under random names; sums of floats depend on the order.
    """

    @functools.wraps(original)
    def _materialize_batch(self: Any, partition_id: str, *arguments: Any, **named: Any) -> Any:
        import transfer_queue

        batch = original(self, partition_id, *arguments, **named)
        # The queue's functions are overloaded for synchronous and asynchronous use, which types do not tell apart.
        data: Any = transfer_queue.kv_batch_get(
            keys=batch.keys, partition_id=partition_id, select_fields=["index", "prompts", "responses"]
        )
        prompts, responses = ([row.tolist() for row in data[name].unbind()] for name in ("prompts", "responses"))
        indices = [int(index) for index in data["index"]]
        asked: dict[str, list[int]] = {}  # a session's first prompt: those of its later rows hold what was sampled
        for key, prompt in sorted(zip(batch.keys, prompts, strict=True)):
            asked.setdefault(key.rsplit("_", 2)[0], prompt)

        def sample(row: int) -> tuple[Any, ...]:
            uid, session, number = batch.keys[row].rsplit("_", 2)
            step = batch.tags[row]["global_steps"]
            return step, indices[row], asked[uid], int(session), int(number), responses[row]

        order = sorted(range(len(batch.keys)), key=sample)
        batch.keys, batch.tags = [batch.keys[row] for row in order], [batch.tags[row] for row in order]
        return batch

    return _materialize_batch


def requests_in_waves(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hands requests to vLLM's scheduler in sorted waves, with VERL_CPU_REPEATABLE=1.

    Needed by vllm/v1/engine/async_llm.py, AsyncLLM.add_request, which sends each to the scheduler as it comes; which
    sequences are computed together, and so the rounding of each, then depends on the clock (waves.py).
    """

    @functools.wraps(original)
    async def add_request(self: Any, request_id: str, prompt: Any, params: Any, *rest: Any, **named: Any) -> Any:
        from verl_rollout_corr.platform import waves

        if not hasattr(self, "_verl_cpu_waves"):
            self._verl_cpu_waves = waves.Waves(self, expected=environment.count(environment.WAVE))
        tokens = prompt.get("prompt_token_ids", ()) if isinstance(prompt, dict) else ()
        key = (tuple(tokens), getattr(params, "seed", None) or 0)
        return await self._verl_cpu_waves.admit(key, lambda: original(self, request_id, prompt, params, *rest, **named))

    return add_request
