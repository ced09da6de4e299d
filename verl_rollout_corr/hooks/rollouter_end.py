"""The end of fully_async's rollouter: an error of it ends a corrected run, as in the other trainers.

FullyAsyncRollouter swallows the exception of a sample (a log-prob too few, say), and sends the trainer its end signal
from a `finally`. The trainer stops as if all samples had been trained on, and the run's exit code is 0. So the signal
carries the exception, and the trainer of a corrected run raises it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from verl_rollout_corr.errors import HookError
from verl_rollout_corr.hooks import activity, wire


def wrap_put_sample(original: Callable[..., Any]) -> Callable[..., Any]:
    """In the rollouter: where an exception is on its way, the end signal says so."""

    @functools.wraps(original)
    async def put_sample(self: Any, sample: Any) -> Any:
        error = sys.exc_info()[1]
        if sample is None and isinstance(error, Exception):
            # A task's error holds the traceback of its process; the last line is the error itself.
            sample = wire.ROLLOUTER_FAILED + (str(error).strip() or type(error).__name__).splitlines()[-1]
        return await original(self, sample)

    return put_sample


def wrap_get_sample(original: Callable[..., Any]) -> Callable[..., Any]:
    """In the trainer: raises HookError if the rollouter ended with an exception. Without a preset it only ends."""

    @functools.wraps(original)
    async def get_sample(self: Any) -> Any:
        found = await original(self)
        sample = found[0] if isinstance(found, tuple) else None
        if not isinstance(sample, str) or not sample.startswith(wire.ROLLOUTER_FAILED):
            return found
        if activity.has_announced(activity.DECIDING_ROLE):
            raise HookError(
                "rollout_corr: the rollouter of fully_async has stopped with an error, after which verl ends the run "
                f"as if all samples had been trained on: {sample.removeprefix(wire.ROLLOUTER_FAILED)}"
            )
        return (None, *found[1:])

    return get_sample
