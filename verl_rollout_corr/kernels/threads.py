"""Chunks of rows, and the threads that take them in turn, without the GIL: as many as torch may use."""

# pyright: basic
from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch

_CHUNK_TOKENS, _CHUNKS = 1 << 14, 128
"""A chunk has at least so many tokens, and there are at most about so many chunks, whatever the number of threads."""

Scratch = TypeVar("Scratch")
"""The memory that one thread works with."""


def chunk_bounds(offsets: np.ndarray) -> np.ndarray:
    """(chunks + 1,) the row where each chunk begins, of about as many tokens. `offsets`: tokens before each row."""
    total, last = int(offsets[-1]), len(offsets) - 1
    target = max(_CHUNK_TOKENS, -(-total // _CHUNKS))
    if total <= target:
        return np.array([0, last])
    bounds = np.searchsorted(offsets, np.arange(0, total + target, target))
    bounds[-1] = last  # a row that is longer than a chunk is the only one of its chunk, and the next ones are empty
    return bounds[np.append(True, bounds[1:] > bounds[:-1])]


def in_turn(chunks: int, take: Callable[[int, Scratch], None], scratch: Callable[[], Scratch]) -> None:
    """Calls `take` with the number of each chunk and the scratch of its thread."""
    numbers = itertools.count()  # next() on it is atomic

    def work() -> None:
        own = scratch()
        while (number := next(numbers)) < chunks:
            take(number, own)

    count = min(torch.get_num_threads(), chunks)
    others = [_pool(os.getpid()).submit(work) for _ in range(count - 1)] if count > 1 else []
    work()
    for other in others:
        other.result()


@lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:
    """The waiting threads. A process forked from this one gets threads of its own."""
    return ThreadPoolExecutor(max_workers=64, thread_name_prefix="rollout_corr")
