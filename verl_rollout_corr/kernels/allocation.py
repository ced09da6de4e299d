"""Memory for answers and scratch: in large pages, and aligned to cache lines."""

# pyright: basic
from __future__ import annotations

import numpy as np

LINE = 64
"""Bytes of a cache line, and of the widest vector. A vector that is not aligned to it touches two lines."""


def aligned(count: int) -> np.ndarray:
    """(count,) uninitialised bytes.

    They come from NumPy, which asks the operating system for large pages. torch does not, and the first access to each
    small page costs more than everything that is written there.
    """
    memory = np.empty(count + LINE, dtype=np.uint8)
    start = -memory.ctypes.data % LINE
    return memory[start : start + count]
