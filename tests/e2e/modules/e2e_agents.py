"""An agent loop with what agents bring: turns with a tool between them, sessions of several rows, and a row in which
the policy produced nothing. In the steps of E2E_AGENT_STEPS; in the others, the recipe's own loop, but that in the step
E2E_LONG_STEP it adds a log-prob to each sample.
"""

from __future__ import annotations

import os
import zlib
from typing import Any
from uuid import uuid4

from seeded_rollouts import SeededRollouts
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

STEPS = {int(step) for step in os.environ.get("E2E_AGENT_STEPS", "").split(",") if step}

LONG = int(os.environ.get("E2E_LONG_STEP", "0"))

TURN = 4
"""Tokens of a turn."""
TOOL = (3, 4, 5)
"""What the tool answers, as token ids; the policy did not sample them, and their log-prob is 0.0, as in verl's own
agent loop.
"""


class Agents(SeededRollouts):
    """By session: 0 answers at once; 1 calls the tool; 2 starts its second row from what the first saw; 3 has a first
    row of the tool's tokens alone.
    """

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> Any:
        """One row, or a list of rows."""
        if kwargs["global_steps"] not in STEPS:
            output = await super().run(sampling_params, priority, **kwargs)
            if kwargs["global_steps"] == LONG:
                output.response_logprobs = [*(output.response_logprobs or []), -0.5]
            return output
        prompt = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        seed = zlib.crc32(repr([kwargs[name] for name in ("global_steps", "index", "session_id")]).encode())

        async def turn(seen: list[int], number: int) -> tuple[list[int], list[float], dict[str, Any]]:
            more = {"seed": seed + number, "max_tokens": TURN}
            found = await self.server_manager.generate(
                request_id=uuid4().hex, prompt_ids=seen, sampling_params=sampling_params | more
            )
            return found.token_ids[:TURN], found.log_probs[:TURN], dict(found.extra_fields)

        tokens, log_probs, extra = await turn(prompt, 0)
        session = kwargs["session_id"]
        if session == 0:
            return _row(prompt, [(tokens, log_probs)], extra)
        if session == 3:
            return [_row(prompt, [(list(TOOL), None)], extra), _row(prompt, [(tokens, log_probs)], extra)]
        seen = prompt + tokens + list(TOOL)
        tokens2, log_probs2, extra2 = await turn(seen, 1)
        if session == 1:
            return _row(prompt, [(tokens, log_probs), (list(TOOL), None), (tokens2, log_probs2)], extra2)
        return [_row(prompt, [(tokens, log_probs)], extra), _row(seen, [(tokens2, log_probs2)], extra2)]


def _row(prompt: list[int], parts: list[tuple[list[int], list[float] | None]], extra: dict[str, Any]) -> Any:
    """A row of these parts: the policy's tokens with their log-probs, the tool's without."""
    return AgentLoopOutput(
        prompt_ids=prompt,
        response_ids=[token for tokens, _ in parts for token in tokens],
        response_mask=[int(log_probs is not None) for tokens, log_probs in parts for _ in tokens],
        response_logprobs=[value for tokens, log_probs in parts for value in (log_probs or [0.0] * len(tokens))],
        num_turns=1 + len(parts),
        metrics=AgentLoopMetrics(),
        extra_fields={**extra, "turn_scores": [], "tool_rewards": []},
    )
