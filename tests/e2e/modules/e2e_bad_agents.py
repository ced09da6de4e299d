"""An agent loop that does not keep its two lists together: every eighth of its samples, from the weights of version
E2E_AGENTS_FROM on, has the log-probs that E2E_AGENTS says (`long`: one too many, `short`: one too few, `none`).
"""

from __future__ import annotations

import itertools
import os
from typing import Any

from seeded_rollouts import SeededRollouts
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

FAULT, FIRST = os.environ["E2E_AGENTS"], int(os.environ["E2E_AGENTS_FROM"])
EVERY = 8
_count = itertools.count()


class BadAgents(SeededRollouts):
    """The recipe's own loop, and what goes wrong behind it."""

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> AgentLoopOutput:
        output = await super().run(sampling_params, priority, **kwargs)
        version = output.extra_fields.get("min_global_steps")
        if version is not None and version >= FIRST and next(_count) % EVERY == 0:
            log_probs = list(output.response_logprobs or [])
            output.response_logprobs = {"long": [*log_probs, -0.5], "short": log_probs[:-1], "none": None}[FAULT]
        return output
