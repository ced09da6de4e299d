"""The sums that `hooks.proof` makes digests of, in one pass over the tokens: the same whole numbers, modulo 2^64."""

# pyright: basic
from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from verl_rollout_corr.kernels import machine
from verl_rollout_corr.kernels.machine import get_int, get_int32, put_int
from verl_rollout_corr.kernels.tensors import by_width
from verl_rollout_corr.kernels.threads import chunk_bounds, in_turn

MASK, KEEP, VALUES, FACTORS, OFFSETS = range(5)
"""Words of the job: addresses. VALUES is 0 where there are none."""

read = machine.get_int  # in each variant another width


def _sum_rows(work, sums, job, first, last):
    """The sum of each row: at each token the decision, as an integer, times the factor of its position."""
    factors, offsets, items = get_int(job, FACTORS), get_int(job, OFFSETS), work
    for row in range(first, last):
        start, total = get_int(offsets, row), 0
        count = get_int(offsets, row + 1) - start
        mask, keep = get_int(job, MASK) + start * items, get_int(job, KEEP) + start * items
        if get_int(job, VALUES) == 0:
            for i in range(count):
                decided = 3 if read(keep, i) != 0 else 1
                total += (decided if read(mask, i) != 0 else 0) * get_int(factors, i)
        else:
            values = get_int(job, VALUES) + start * 4
            for i in range(count):
                decided = 3 + (get_int32(values, i) << 2) if read(keep, i) != 0 else 1
                total += (decided if read(mask, i) != 0 else 0) * get_int(factors, i)
        put_int(sums, row, total)


SUM_ROWS = by_width(_sum_rows)
"""The kernel for each item size of mask and keep. It takes (item size, sums, job, first row, last row)."""


def row_sums(mask: Tensor, keep: Tensor, values: Tensor | None, offsets: np.ndarray, factors: Tensor) -> Tensor | None:
    """(B,) int64, or None for tensors that torch has to read: empty ones, other devices, floats, holes.

    `mask` and `keep`: the tokens of all rows, in one piece or padded; whole numbers or bool of one width. `values`:
    float32 or None. `offsets` (B + 1,) and `factors` (longest row,): int64.
    """
    inputs = [mask, keep] if values is None else [mask, keep, values]
    if any(tensor.device.type != "cpu" or not tensor.is_contiguous() for tensor in inputs) or not mask.numel():
        return None
    if mask.dtype.is_floating_point or keep.dtype.is_floating_point or mask.dtype.itemsize != keep.dtype.itemsize:
        return None
    if values is not None and values.dtype != torch.float32:
        return None
    sums = torch.empty(len(offsets) - 1, dtype=torch.int64)
    addresses = [mask.data_ptr(), keep.data_ptr(), 0 if values is None else values.data_ptr()]
    job = np.array([*addresses, factors.data_ptr(), offsets.ctypes.data], dtype=np.int64)
    kernel = SUM_ROWS[mask.dtype.itemsize].entry()
    chunks = chunk_bounds(offsets)

    def take(number: int, _: None) -> None:
        rows = int(chunks[number]), int(chunks[number + 1])
        kernel(mask.dtype.itemsize, sums.data_ptr(), job.ctypes.data, *rows)

    in_turn(len(chunks) - 1, take, lambda: None)
    return sums
