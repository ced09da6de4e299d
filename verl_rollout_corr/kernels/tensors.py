"""Stages that read tensors of every dtype into slots, find the runs of a mask, and write the answer."""

# pyright: basic
from __future__ import annotations

from functools import cache
from types import FunctionType

import torch

from verl_rollout_corr.kernels import machine
from verl_rollout_corr.kernels import memory as m
from verl_rollout_corr.kernels.machine import get, get_int, put, put_float32, put_int
from verl_rollout_corr.kernels.stages import Stage, stage

read, write = machine.get, machine.put_int  # in each variant another width


def _widen(work, totals, settings, first, count):
    """Reads `count` numbers at the address `settings` into the slot that starts at `first`."""
    for i in range(count):
        put(work, first + i, read(settings, i))


def _next_run(work, totals, settings, first, count):
    """The next run of ones of the mask at the address `settings`: from position `first` on, in `count` positions.

    `totals`: the bits of 1. Looks at 64 positions at a time, and then for the edge among them.
    """
    one = totals
    start = first
    while start < count:
        some, width = 0, min(64, count - start)
        for i in range(start, start + width):
            some |= read(settings, i)
        if some != 0:
            break
        start += width
    while start < count and read(settings, start) == 0:
        start += 1
    end = start
    while end < count:
        others, width = 0, min(64, count - end)
        for i in range(end, end + width):
            others |= read(settings, i) ^ one
        if others != 0:
            break
        end += width
    while end < count and read(settings, end) == one:
        end += 1
    put_int(work, m.RUN_START, start)
    put_int(work, m.RUN_END, end)
    put_int(work, m.BAD_MASK, 1 if end < count and read(settings, end) != 0 else 0)


def _store_keep(work, totals, settings, first, count):
    """Writes KEEP of `count` tokens of the block, from `first` on, as the answer; `totals`: the bits of 1."""
    for i in range(count):
        write(settings, i, totals if get_int(work, m.KEEP + first + i) != 0 else 0)


def _drop(work, totals, settings, first, count):
    """Clears keep where KEEP of a token of the block is 0, if there is any, and counts those that were kept."""
    if get_int(work, m.LEAVING) > 0:
        left = 0
        for i in range(count):
            kept, leaves = read(settings, i), get_int(work, m.KEEP + first + i) == 0
            left += leaves & (kept != 0)
            write(settings, i, 0 if leaves else kept)
        put_int(work, m.LOST, get_int(work, m.LOST) + left)


def _variant(template, suffix: str, **names) -> Stage:
    """The template with another `read` or `write`."""
    function = FunctionType(template.__code__, {**template.__globals__, **names}, template.__name__ + suffix)
    function.__module__, function.__qualname__ = template.__module__, template.__name__ + suffix
    return stage(function)


@stage
def store_weights(work, totals, settings, first, count):
    """Writes the slot WEIGHT from `first` on as float32 at the address `settings`."""
    for i in range(count):
        put_float32(settings, i, get(work, m.WEIGHT + first + i))


@stage
def repeat(work, totals, settings, first, count):
    """Reads one float64 at the address `settings` into `count` places of a slot."""
    for i in range(count):
        put(work, first + i, get(settings, 0))


def _widening(suffix: str) -> Stage:
    return _variant(_widen, suffix, read=getattr(machine, f"get{suffix}"))


def by_width(template) -> dict[int, Stage]:
    """The template for items of each width."""
    suffixes = {1: "_int8", 2: "_int16", 4: "_int32", 8: "_int"}
    return {
        width: _variant(template, suffix, read=getattr(machine, "get" + suffix), write=getattr(machine, "put" + suffix))
        for width, suffix in suffixes.items()
    }


WIDEN: dict[torch.dtype, Stage] = {
    torch.float64: _widening(""),
    torch.float32: _widening("_float32"),
    torch.bfloat16: _widening("_bfloat16"),
    torch.float16: _widening("_float16"),
}
"""Reads log-probs of a dtype into a slot, by (work, -, address, slot, count)."""

NEXT_RUN: dict[int, Stage] = by_width(_next_run)
"""Finds the next run of a mask, by the bytes of its items: (work, bits of 1, address, from, positions)."""

STORE_KEEP: dict[int, Stage] = by_width(_store_keep)
"""Writes KEEP by the bytes of the items: (work, bits of 1, address, from, count)."""

DROP: dict[int, Stage] = by_width(_drop)
"""Clears keep where KEEP is 0, by the bytes of the items: (work, -, address, from, count)."""


@cache
def bits_of_one(dtype: torch.dtype) -> int:
    """The bits of 1 in memory."""
    unsigned = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return int(torch.ones(1, dtype=dtype).view(unsigned)[0])
