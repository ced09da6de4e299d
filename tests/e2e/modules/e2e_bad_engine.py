"""An engine whose log-probs are wrong. E2E_ENGINE is a list such as `nan@1,shift@2`: what happens to samples of which
weights.

The weights' version is verl's: 0 for those of the first step.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import zlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from e2e_after_import import after_import

LogProbs = list[float]
EVERY = 8
"""`nan`, `none` and `short` happen to every eighth sample; `shift` and `drift` to all, as they do in the field."""
SURE = -1e-4


def _drift(log_probs: LogProbs, tokens: list[int]) -> LogProbs:
    """A mismatch of every kind that a criterion looks for, by the sample's own tokens: of four samples one is exact,
    one is off by little that cancels, one is off with tokens of which the engine is far too sure or not sure enough,
    and one is everywhere surer than it should be.
    """
    drawn = random.Random(zlib.crc32(repr(list(tokens)).encode()))
    kind = drawn.randrange(4)

    def off(place: int, log_prob: float) -> float:
        if kind == 1:
            return log_prob + (0.02 if place % 2 else -0.02) + 0.0004
        if kind == 2:
            rare = drawn.random()
            return -0.1 if rare < 0.15 else log_prob - 2 if rare < 0.3 else log_prob + drawn.gauss(0, 0.3)
        # Never twice the same: among equals, rounding would decide which of them a criterion over the batch takes.
        return log_prob + 0.7 + 0.2 * drawn.random()

    return [min(off(place, log_prob), SURE) if kind else log_prob for place, log_prob in enumerate(log_probs)]


FAULTS: dict[str, Callable[[LogProbs, list[int]], LogProbs | None]] = {
    "nan": lambda log_probs, _: [math.nan, *log_probs[1:]],
    "none": lambda log_probs, _: None,
    "short": lambda log_probs, _: log_probs[:-1],
    "shift": lambda log_probs, _: [log_probs[-1], *log_probs[:-1]],
    "drift": _drift,
}
_plan = {version: fault for fault, version in (entry.split("@") for entry in os.environ["E2E_ENGINE"].split(","))}
_count = itertools.count()


def _spoil(server: ModuleType) -> None:
    original = server.vLLMHttpServer.generate

    async def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = await original(self, *args, **kwargs)
        fault = _plan.get(str(self.global_steps))
        if fault is not None and output.log_probs and (fault in ("shift", "drift") or next(_count) % EVERY == 0):
            output.log_probs = FAULTS[fault](list(output.log_probs), output.token_ids)
        return output

    server.vLLMHttpServer.generate = generate


after_import("verl.workers.rollout.vllm_rollout.vllm_async_server", _spoil)
