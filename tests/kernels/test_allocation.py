"""Memory that goes from one call to the next: only when nothing refers to it any more."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch

pytest.importorskip("llvmlite")

from verl_rollout_corr.kernels import allocation

COUNT = allocation.LARGE


@pytest.fixture(autouse=True)
def nothing_idle(monkeypatch: pytest.MonkeyPatch) -> deque[Any]:
    """Blocks of other tests are put aside."""
    idle: deque[Any] = deque(maxlen=4)
    monkeypatch.setattr(allocation, "_idle", idle)
    return idle


def test_a_block_is_used_again_when_its_tensor_is_gone(nothing_idle: deque[Any]) -> None:
    first = allocation.uninitialised(COUNT, torch.float32).fill_(7.0)
    address = first.data_ptr()
    assert address % allocation.LINE == 0 and not nothing_idle
    second = allocation.uninitialised(COUNT, torch.float32)
    assert second.data_ptr() != address
    del first
    assert len(nothing_idle) == 1
    assert allocation.uninitialised(COUNT + 1000, torch.float32).data_ptr() == address


PARTS: dict[str, Any] = {
    "view": lambda whole: whole.view(2, -1)[1],
    "numpy": lambda whole: whole.numpy()[-3:],
    "slice": lambda whole: whole[5:9],
    "detached": lambda whole: whole.detach(),
}


@pytest.mark.parametrize("part", PARTS)
def test_whatever_refers_to_it_keeps_it(part: str, nothing_idle: deque[Any]) -> None:
    """A slice, an array or another view of a tensor is still its memory."""
    whole = allocation.uninitialised(COUNT, torch.int64).fill_(7)
    kept = PARTS[part](whole)
    del whole
    assert not nothing_idle
    allocation.uninitialised(COUNT, torch.int64).fill_(8)
    assert (kept == 7).all()
    del kept
    assert len(nothing_idle) == 2


def test_a_block_that_does_not_fit_stays(nothing_idle: deque[Any]) -> None:
    """Neither one that is too small nor one that is twice too large; at most four wait."""
    for size in (1, 3, 9, 27, 81):
        allocation.uninitialised(size * COUNT, torch.int8)
    assert [len(block) // COUNT for block in nothing_idle] == [4, 11, 31, 92]
    assert len(allocation._found(10 * COUNT) or "") // COUNT == 11
    assert allocation._found(16 * COUNT) is not None
    assert allocation._found(60 * COUNT) is not None
    assert allocation._found(5 * COUNT) is None


def test_the_system_may_take_what_is_idle_and_large(nothing_idle: deque[Any]) -> None:
    """Small blocks are not worth the call; a block that cannot be offered is given up."""
    offered: list[int] = []

    class Block(bytearray):
        def madvise(self, advice: int) -> None:
            offered.append(advice)
            if len(offered) > 1:
                raise OSError

    for size in (allocation._LENT - 1, allocation._LENT, allocation._LENT):
        allocation._give_back(Block(size))  # type: ignore[arg-type]
    assert offered == [allocation.mmap.MADV_FREE] * 2
    assert [len(block) for block in nothing_idle] == [allocation._LENT - 1, allocation._LENT]


def test_small_memory_is_numpys(nothing_idle: deque[Any]) -> None:
    small = allocation.uninitialised(5, torch.float32)
    assert small.data_ptr() % allocation.LINE == 0 and small.shape == (5,)
    del small
    assert not nothing_idle
