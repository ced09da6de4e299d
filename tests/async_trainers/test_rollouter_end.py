"""A rollouter of fully_async that stops with an error ends a corrected run; verl alone ends as if it were done.

verl's own rollouter, client and queue in one process, without Ray.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from verl.experimental.fully_async_policy.fully_async_rollouter import FullyAsyncRollouter
from verl.experimental.fully_async_policy.message_queue import MessageQueueClient

from verl_rollout_corr.errors import HookError, InputError
from verl_rollout_corr.hooks import activity, wire
from verl_rollout_corr.hooks.rollouter_end import wrap_get_sample, wrap_put_sample

SAID = "rollout_corr: a sample of prompt 41: 2 log-probs for 3 tokens"


class Queue:
    """verl's MessageQueue as its client sees it."""

    def __init__(self) -> None:
        self.samples: list[Any] = []
        self.put_sample = SimpleNamespace(remote=lambda sample: self._done(self.samples.append(sample)))
        self.get_sample = SimpleNamespace(remote=lambda: self._done((self.samples.pop(0), len(self.samples))))

    @staticmethod
    def _done(value: Any) -> Any:
        future: Future[Any] = Future()
        future.set_result(value)
        return SimpleNamespace(future=lambda: future)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the plug-in is installed, verl has loaded it in this process."""
    for name in ("put_sample", "get_sample"):
        monkeypatch.setattr(MessageQueueClient, name, inspect.unwrap(getattr(MessageQueueClient, name)))


@pytest.fixture
def hooked(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MessageQueueClient, "put_sample", wrap_put_sample(MessageQueueClient.put_sample))
    monkeypatch.setattr(MessageQueueClient, "get_sample", wrap_get_sample(MessageQueueClient.get_sample))


def rolled_out(sample: Callable[[], Any]) -> Any:
    """verl's rollouter, whose processor makes this sample: what it leaves in the queue, and its client."""
    rayed: Any = FullyAsyncRollouter
    rollouter: Any = object.__new__(rayed.__ray_actor_class__)

    async def feed() -> None:
        await asyncio.sleep(0)

    async def process() -> None:
        await rollouter.message_queue_client.put_sample(sample())

    rollouter._feed_samples, rollouter._processor_worker = feed, process
    rollouter.async_rollout_manager, rollouter.max_concurrent_samples = object(), 1
    rollouter.message_queue_client = MessageQueueClient(Queue())

    async def run() -> None:
        rollouter.lock, rollouter.pending_queue = asyncio.Lock(), asyncio.Queue()
        await asyncio.gather(rollouter._streaming_generation_main(), return_exceptions=True)

    asyncio.run(run())
    return rollouter.message_queue_client


def fails() -> Any:
    raise InputError(SAID)


async def all_of(client: Any) -> list[Any]:
    return [await client.get_sample() for _ in list(client.queue_actor.samples)]


@pytest.mark.usefixtures("hooked")
def test_case_45_an_error_of_the_rollouter_is_raised_in_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "_announced", {"trainer": "preset=k3_rs"})
    with pytest.raises(HookError, match=f"the rollouter of fully_async has stopped with an error.*: {SAID}"):
        asyncio.run(all_of(rolled_out(fails)))


@pytest.mark.usefixtures("hooked")
def test_without_a_preset_it_is_verls_end_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "_announced", {"driver": "preset=k3_rs"})
    assert asyncio.run(all_of(rolled_out(fails))) == [(None, 0)]


@pytest.mark.usefixtures("hooked")
def test_a_rollouter_that_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "_announced", {"trainer": "preset=k3_rs"})
    assert asyncio.run(all_of(rolled_out(lambda: b"sample"))) == [(b"sample", 1), (None, 0)]


@pytest.mark.usefixtures("alone")
def test_verl_alone_ends_as_if_it_were_done() -> None:
    """When this fails, the seam can go."""
    client = rolled_out(fails)
    assert client.queue_actor.samples == [None]


@pytest.mark.usefixtures("hooked")
def test_an_error_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent() -> Any:
        raise KeyError

    assert rolled_out(silent).queue_actor.samples == [wire.ROLLOUTER_FAILED + "KeyError"]
