"""Requests reach the engine in sorted waves, whatever the order and the moments in which they come. The clock is the
test's own: nothing here depends on how long something takes.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import selectors
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from verl_rollout_corr.platform import waves

SIZE = 4


class Clock(selectors.SelectSelector):
    """Never waits: where a loop has nothing to do until a moment, it is that moment."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "everybody waits, and nothing will ever happen"
        self.now += max(timeout, 0.0)
        return super().select(0)


def play(scenario: Coroutine[Any, Any, Any]) -> Any:
    """Runs it in a loop whose time is a Clock's."""
    clock = Clock()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now
    try:
        return loop.run_until_complete(scenario)
    finally:
        loop.close()


def now() -> float:
    return asyncio.get_running_loop().time()


class Engine:
    """The parts of vLLM's AsyncLLM that a wave uses; what happens is written to `log`."""

    def __init__(self, *, paused: bool = False) -> None:
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=SIZE))
        self.output_processor = self
        self.engine_core = self
        self.paused = paused
        self.unfinished = 0
        self.log: list[Any] = []

    def has_unfinished_requests(self) -> bool:
        return self.unfinished > 0

    async def is_scheduler_paused_async(self) -> bool:
        return self.paused

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        assert mode == "keep" and not clear_cache and not self.unfinished
        self.paused = True
        self.log.append("pause")

    async def resume_scheduler_async(self) -> None:
        self.paused = False
        self.log.append("resume")

    async def abort(self, request_id: int, internal: bool) -> None:
        assert internal
        self.log.append(f"abort {request_id}")

    async def add(self, number: int) -> Any:
        await asyncio.sleep(0.002)
        assert self.paused
        if number < 0:
            raise ValueError("negative")
        self.unfinished += 1
        self.log.append(number)
        return SimpleNamespace(request_id=number)

    async def answer(self, seconds: float) -> None:
        """Every request so far is answered."""
        await asyncio.sleep(seconds)
        self.unfinished = 0


async def ask(engine: Engine, gate: waves.Waves, number: int, delay: float = 0.0) -> int:
    await asyncio.sleep(delay)
    return (await gate.admit((number,), lambda: engine.add(number))).request_id


@pytest.mark.parametrize("seed", range(5))
def test_a_full_wave_goes_sorted_and_at_once(seed: int) -> None:
    async def scenario() -> list[Any]:
        engine = Engine()
        gate = waves.Waves(engine)
        numbers = random.Random(seed).sample(range(SIZE), SIZE)
        answers = await asyncio.gather(*(ask(engine, gate, number, delay=number * 0.002) for number in numbers))
        assert answers == numbers
        assert now() < waves.QUIET
        return engine.log

    assert play(scenario()) == ["pause", 0, 1, 2, 3, "resume"]


def test_a_small_wave_goes_when_no_more_comes() -> None:
    async def scenario() -> list[Any]:
        engine = Engine()
        gate = waves.Waves(engine)
        await asyncio.gather(ask(engine, gate, 2), ask(engine, gate, 1, delay=0.9 * waves.QUIET))
        assert 1.9 * waves.QUIET < now() < 2 * waves.QUIET
        return engine.log

    assert play(scenario()) == ["pause", 1, 2, "resume"]


def test_a_stall_does_not_split_a_wave_of_a_known_size() -> None:
    """Neither a smaller one than the engine computes together, nor a bigger one."""

    async def scenario(expected: int) -> list[Any]:
        engine = Engine()
        gate = waves.Waves(engine, expected=expected)
        numbers = range(expected - 1, -1, -1)
        many = [asyncio.create_task(ask(engine, gate, number, 0.9 * waves.PATIENCE * number)) for number in numbers]
        while not all(task.done() for task in many):
            await engine.answer(1.0)
        assert now() < 0.9 * waves.PATIENCE * (expected - 1) + 3.0
        return engine.log

    assert play(scenario(SIZE - 1)) == ["pause", 0, 1, 2, "resume"]
    assert play(scenario(SIZE + 2)) == ["pause", 0, 1, 2, 3, "resume", "pause", 4, 5, "resume"]


def test_patience_ends_with_the_first_wave_that_stays_incomplete() -> None:
    """A validation, or the second turn of some conversations: from then on, any number may come."""

    async def scenario() -> list[Any]:
        engine = Engine()
        gate = waves.Waves(engine, expected=3)
        began: list[float] = []
        for numbers in ((1, 2), (3,), (6, 5, 4)):
            began.append(now())
            await asyncio.gather(*(ask(engine, gate, number) for number in numbers))
            await engine.answer(0.0)
        began.append(now())
        first, second, full = (later - sooner for sooner, later in itertools.pairwise(began))
        assert waves.PATIENCE <= first < waves.PATIENCE + 0.1
        assert waves.QUIET <= second < waves.QUIET + 0.1
        assert full < 0.1
        return engine.log

    assert play(scenario()) == ["pause", 1, 2, "resume", "pause", 3, "resume", "pause", 4, 5, 6, "resume"]


def test_who_comes_too_late_for_a_wave_that_is_cut_is_in_the_next_one() -> None:
    async def scenario() -> list[Any]:
        engine = Engine()
        gate = waves.Waves(engine, expected=SIZE + 1)
        many = [asyncio.create_task(ask(engine, gate, number)) for number in range(1, SIZE + 2)]
        await asyncio.gather(*many[:SIZE])
        late = asyncio.create_task(ask(engine, gate, 0))
        await engine.answer(0.1)
        await many[-1]
        await engine.answer(0.1)
        await late
        return engine.log

    assert play(scenario()) == ["pause", 1, 2, 3, 4, "resume", "pause", 5, "resume", "pause", 0, "resume"]


def test_the_next_wave_waits_for_the_answers() -> None:
    async def scenario() -> list[Any]:
        engine = Engine()
        gate = waves.Waves(engine)
        many = [asyncio.create_task(ask(engine, gate, number)) for number in range(SIZE + 2)]
        await asyncio.gather(*many[:SIZE])
        await asyncio.sleep(2 * waves.QUIET)
        assert engine.log == ["pause", 0, 1, 2, 3, "resume"]
        await engine.answer(0.0)
        await asyncio.gather(*many)
        return engine.log[SIZE + 2 :]

    assert play(scenario()) == ["pause", 4, 5, "resume"]


def test_a_request_that_fails_fails_alone() -> None:
    async def scenario() -> list[Any]:
        engine = Engine()
        gate = waves.Waves(engine)
        answers = await asyncio.gather(*(ask(engine, gate, number) for number in (1, -1, 2)), return_exceptions=True)
        assert answers[0] == 1 and answers[2] == 2 and isinstance(answers[1], ValueError)
        return engine.log

    assert play(scenario()) == ["pause", 1, 2, "resume"]


def test_a_request_that_was_given_up_is_not_added() -> None:
    async def scenario() -> list[Any]:
        engine = Engine()
        gate = waves.Waves(engine)
        tasks = [asyncio.create_task(ask(engine, gate, number)) for number in (1, 2)]
        await asyncio.sleep(0.01)
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return engine.log

    assert play(scenario()) == ["pause", 2, "resume"]


def test_a_caller_who_leaves_while_the_request_is_added_takes_nobody_along() -> None:
    """The request is aborted, and the wave goes on."""

    async def scenario() -> list[Any]:
        engine = Engine()
        gate = waves.Waves(engine)
        tasks = [asyncio.create_task(ask(engine, gate, number)) for number in range(SIZE)]
        while "pause" not in engine.log:
            await asyncio.sleep(0)
        tasks[0].cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(answers[0], asyncio.CancelledError) and answers[1:] == [1, 2, 3]
        return engine.log

    assert play(scenario()) == ["pause", 0, "abort 0", 1, 2, 3, "resume"]


@pytest.mark.parametrize("broken", ["is_scheduler_paused_async", "pause_scheduler_async", "resume_scheduler_async"])
def test_a_dead_engine_is_an_error_for_every_caller(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for ever, and neither does who comes later."""

    async def dead(*arguments: Any, **named: Any) -> None:
        raise ConnectionError("dead")

    async def scenario() -> list[Any]:
        engine = Engine()
        gate = waves.Waves(engine)
        monkeypatch.setattr(engine, broken, dead)
        many = await asyncio.gather(*(ask(engine, gate, number) for number in (1, 2)), return_exceptions=True)
        engine.unfinished = 0
        late = await asyncio.gather(ask(engine, gate, 3), return_exceptions=True)
        return [*many, *late]

    answers = play(asyncio.wait_for(scenario(), timeout=5))
    if broken == "resume_scheduler_async":  # they were added before
        assert answers[:2] == [1, 2]
    else:
        assert all(isinstance(answer, ConnectionError) for answer in answers)


def test_a_pause_of_verls_is_left_to_verl() -> None:
    """It pauses the engine while it sends weights."""

    async def scenario() -> Engine:
        engine = Engine(paused=True)
        await ask(engine, waves.Waves(engine), 1)
        return engine

    engine = play(scenario())
    assert engine.log == [1] and engine.paused
