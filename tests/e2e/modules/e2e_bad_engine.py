"""An engine whose log-probs are wrong. E2E_ENGINE is a list such as `nan@1,shift@2`: what happens to samples of which
weights.

The weights' version is verl's: 0 for those of the first step.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from e2e_after_import import after_import

FAULTS: dict[str, Callable[[list[float]], list[float] | None]] = {
    "nan": lambda log_probs: [math.nan, *log_probs[1:]],
    "none": lambda log_probs: None,
    "short": lambda log_probs: log_probs[:-1],
    "shift": lambda log_probs: [log_probs[-1], *log_probs[:-1]],
}
EVERY = 8
"""`nan`, `none` and `short` happen to every eighth sample; `shift` to all, as it does in the field."""
_plan = dict(reversed(entry.split("@")) for entry in os.environ["E2E_ENGINE"].split(","))
_count = itertools.count()


def _spoil(server: ModuleType) -> None:
    original = server.vLLMHttpServer.generate

    async def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = await original(self, *args, **kwargs)
        fault = _plan.get(str(self.global_steps))
        if fault is not None and output.log_probs and (fault == "shift" or next(_count) % EVERY == 0):
            output.log_probs = FAULTS[fault](list(output.log_probs))
        return output

    server.vLLMHttpServer.generate = generate


after_import("verl.workers.rollout.vllm_rollout.vllm_async_server", _spoil)
