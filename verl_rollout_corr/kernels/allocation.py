"""Memory for answers and scratch: in large pages, and at addresses that whole cache lines begin at."""

# pyright: basic
from __future__ import annotations

import numpy as np

LINE = 64
"""Bytes of a cache line, and of the widest vector: one that begins elsewhere needs two lines."""


def aligned(count: int) -> np.ndarray:
    """(count,) bytes without values in them.

    NumPy asks the kernel for large pages, torch does not: the first touch of each small one costs more than all that
    is written there.
    """
    memory = np.empty(count + LINE, dtype=np.uint8)
    start = -memory.ctypes.data % LINE
    return memory[start : start + count]
