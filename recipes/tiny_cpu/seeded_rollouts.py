"""An agent loop that gives every request a seed of its own, so that a run can be repeated.

verl's `rollout.full_determinism` gives all requests the same seed: the samples of a prompt would be equal, and GRPO
would learn nothing.
"""

from __future__ import annotations

import itertools
import zlib
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

_requests = itertools.count()


class SeededRollouts(SingleTurnAgentLoop):
    """One prompt, one answer; the seed depends on the run's seed and on which sample of which step it is."""

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> AgentLoopOutput:
        # V1 says which sample it is. RayPPOTrainer does not, but starts the requests of a process in order.
        names = ("global_steps", "index", "session_id")
        sample = tuple(kwargs[name] for name in names) if all(name in kwargs for name in names) else next(_requests)
        seed = zlib.crc32(repr((self.rollout_config.seed, sample)).encode())
        return await super().run({**sampling_params, "seed": seed}, priority, **kwargs)
