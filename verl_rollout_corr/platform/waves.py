"""Requests go to vLLM in waves, so that what it computes together, and so its rounding, does not depend on the clock.

BF16 log-probs of a sequence depend on the other sequences in its batch, and these depend on which requests had arrived
when the scheduler looked. Here requests wait until a wave is complete: until there are as many as the server gets in a
step, if that number is known, else `max_num_seqs`. They are sorted and handed over while the scheduler is paused,
`max_num_seqs` at a time; the next ones follow when these have been answered.

Validation and further turns of a conversation send an unknown number of requests, so a wave is also complete when no
request has come for a while. That time must not split a wave on a busy machine: it is PATIENCE seconds until a wave has
been incomplete once, and QUIET seconds from then on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

QUIET = 0.25
"""Seconds without a further request after which a wave is complete, if no number is known or one wave fell short."""

PATIENCE = 10.0
"""The same while every wave was as large as expected: on a busy machine a process may wait so long for a core."""

_LOOK = 0.01
"""Seconds between two looks at a wave that is not answered yet."""


@dataclass(frozen=True)
class _Waiting:
    key: tuple[Any, ...]
    add: Callable[[], Awaitable[Any]]
    added: asyncio.Future[Any]


class Waves:
    """The requests of one engine (vLLM's AsyncLLM), of which `expected` come in a step; 0 if that is not known."""

    def __init__(self, engine: Any, *, expected: int = 0) -> None:
        self._engine = engine
        self._size = int(engine.vllm_config.scheduler_config.max_num_seqs)
        self._complete = expected or self._size
        self._quiet = PATIENCE if expected else QUIET
        self._waiting: list[_Waiting] = []
        self._sorted: list[_Waiting] = []
        self._last = 0.0
        self._next: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    async def admit(self, key: tuple[Any, ...], add: Callable[[], Awaitable[Any]]) -> Any:
        """Calls `add()` when the request's wave starts and returns its result. A wave is in the order of `key`."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(key, add, loop.create_future())
        self._waiting.append(waiting)
        self._last = loop.time()
        self._look()
        return await waiting.added

    def _look(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
        self._waiting = [waiting for waiting in self._waiting if not waiting.added.done()]  # given up by the caller
        if not (self._waiting or self._sorted) or self._task is not None:
            return
        loop = asyncio.get_running_loop()
        ready = bool(self._sorted) or len(self._waiting) >= self._complete
        wait = 0.0 if ready else self._last + self._quiet - loop.time()
        if self._engine.output_processor.has_unfinished_requests():
            wait = max(wait, _LOOK)
        if wait > 0:
            self._next = loop.call_later(wait, self._look)
            return
        if not self._sorted:
            self._close()
        now, self._sorted = self._sorted[: self._size], self._sorted[self._size :]
        self._task = loop.create_task(self._start(now))

    def _close(self) -> None:
        """Closes the wave to further requests."""
        if len(self._waiting) < self._complete:
            self._quiet = QUIET
        wave = sorted(self._waiting, key=lambda waiting: waiting.key)
        self._sorted, self._waiting = wave[: self._complete], wave[self._complete :]

    async def _start(self, wave: list[_Waiting]) -> None:
        try:
            await self._add(wave)
        except Exception as error:  # the engine is dead: each caller is told so, as it would be without waves
            for waiting in wave:
                if not waiting.added.done():
                    waiting.added.set_exception(error)
        finally:
            self._task = None
            self._look()

    async def _add(self, wave: list[_Waiting]) -> None:
        core = self._engine.engine_core
        ours = not await core.is_scheduler_paused_async()  # else it is verl's pause, and verl ends it
        if ours:
            await core.pause_scheduler_async(mode="keep", clear_cache=False)
        try:
            for waiting in wave:
                if not waiting.added.done():
                    await self._add_one(waiting)
        finally:
            if ours:
                await core.resume_scheduler_async()

    async def _add_one(self, waiting: _Waiting) -> None:
        try:
            request = await waiting.add()
        except Exception as error:
            if not waiting.added.done():
                waiting.added.set_exception(error)
            return
        if not waiting.added.done():
            waiting.added.set_result(request)
        else:  # the caller went away meanwhile
            await self._engine.abort(request.request_id, internal=True)
