"""The agent loop of the multi-turn stand-in: a turn, a tool's answer, a turn. A tiny model calls no tool by itself."""

from __future__ import annotations

import zlib
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

TURN = 4
ANSWER = (3, 4, 5)
"""What the tool says, as token ids: the policy did not sample them, so that their mask is 0."""


class TwoTurns(AgentLoopBase):
    """Both turns in one row, with the tool's tokens between them."""

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> AgentLoopOutput:
        """One row."""
        prompt = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        seed = zlib.crc32(repr([kwargs.get(name) for name in ("global_steps", "index", "session_id")]).encode())
        tokens: list[int] = []
        mask: list[int] = []
        log_probs: list[float] = []
        extra: dict[str, Any] = {}
        for turn in range(2):
            found = await self.server_manager.generate(
                request_id=uuid4().hex,
                prompt_ids=prompt + tokens,
                sampling_params={**sampling_params, "seed": seed + turn, "max_tokens": TURN},
            )
            said = found.token_ids[:TURN]
            tokens += said
            mask += [1] * len(said)
            log_probs += found.log_probs[: len(said)]
            extra = dict(found.extra_fields)
            if turn == 0:
                tokens += ANSWER
                mask += [0] * len(ANSWER)
                log_probs += [0.0] * len(ANSWER)
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=tokens,
            response_mask=mask,
            response_logprobs=log_probs,
            num_turns=4,
            metrics=AgentLoopMetrics(),
            extra_fields={**extra, "turn_scores": [], "tool_rewards": []},
        )
