"""Memory for answers and scratch: in large pages, aligned to cache lines, and used again by the next call.

The system clears each page before a process gets it, and may have to look for a large one: for a large answer that
takes as long as everything that is computed, and several times as long on a machine whose memory is in pieces. So a
block whose tensors are gone serves the next call. Until then the system may take the pages of a large one.
"""

# pyright: basic
from __future__ import annotations

import mmap
import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor

LINE = 64
"""Bytes of a cache line, and of the widest vector. A vector that is not aligned to it touches two lines."""

LARGE = 1 << 21
"""Bytes of a large page; memory that is smaller than an eighth of it is NumPy's."""

_LENT = 1 << 24
"""Idle blocks of so many bytes are offered to the system. For smaller ones that costs more than it saves."""

_idle: deque[mmap.mmap] = deque(maxlen=4)
"""Blocks that nothing uses, oldest first: keep, weights, and what a criterion or a normalisation of the batch needs."""

_CAN_WAIT = hasattr(mmap, "MADV_HUGEPAGE") and hasattr(mmap, "MADV_FREE")


def uninitialised(count: int, dtype: torch.dtype) -> Tensor:
    """(count,) numbers that are not set."""
    size = count * dtype.itemsize
    if size < LARGE // 8 or not _CAN_WAIT:
        return torch.from_numpy(_small(size)).view(dtype)
    block = _found(size) or _new(size)
    view = memoryview(block)
    # A tensor holds on to the object whose memory it was made of, here the view. When no tensor is left, it goes.
    weakref.finalize(view, _give_back, block).atexit = False
    return torch.frombuffer(view, dtype=dtype, count=count)


def aligned(count: int) -> np.ndarray:
    """(count,) uninitialised bytes, as an array."""
    return uninitialised(count, torch.uint8).numpy()


def _small(size: int) -> np.ndarray:
    memory = np.empty(size + LINE, dtype=np.uint8)
    start = -memory.ctypes.data % LINE
    return memory[start : start + size]


def _found(size: int) -> mmap.mmap | None:
    """An idle block that is large enough and not wasteful; threads may ask at the same time."""
    for block in tuple(_idle):
        if size <= len(block) <= 2 * size + LARGE:
            try:
                _idle.remove(block)
            except ValueError:
                continue  # another thread has taken it
            return block
    return None


def _new(size: int) -> mmap.mmap:
    """A block with room for a slightly larger batch; memory that nothing touches costs nothing."""
    rounded = -(-(size + size // 8) // LARGE) * LARGE
    block = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_HUGEPAGE)
    return block


def _give_back(block: mmap.mmap) -> None:
    """Lets the system have the pages if it needs them, and keeps the block."""
    if len(block) >= _LENT:
        try:
            block.madvise(mmap.MADV_FREE)
        except OSError:
            return
    _idle.append(block)
