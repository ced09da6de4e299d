"""Stages: the kernels that others call by address, each loaded from disk or compiled when it is first needed."""

# pyright: basic
from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from verl_rollout_corr.kernels import objects
from verl_rollout_corr.kernels.expressions import Function
from verl_rollout_corr.kernels.machine import EXACT, LOOSE
from verl_rollout_corr.kernels.translation import module_of

_CALL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)


def _digest() -> str:
    package = Path(__file__).parents[1]
    sources = sorted(path for room in ("kernels", "maths") for path in (package / room).glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]


DIGEST = _digest()
"""A digest of all sources, because a kernel consists of functions of several files and constants of the maths."""


class Stage:
    """A kernel of five int64, f(work, sums, settings, first, count)."""

    def __init__(self, function: Callable[..., None], flags: tuple[str, ...]) -> None:
        self.function = Function(cast(Any, function), flags)
        module = function.__module__.rpartition(".")[2]
        self.name = f"{module}.{function.__qualname__}"
        self.compiled_here = False

    @cached_property
    def address(self) -> int:
        """The address at which other kernels call it."""
        with _compiling:
            file = f"{self.name}-{DIGEST}"
            code = objects.load(file)
            if code is None:
                self.compiled_here = True
                code = objects.compiled(str(module_of(self.name, self.function)))
                objects.save(file, code)
            return objects.linked(self.name, code)

    def entry(self) -> Callable[..., None]:
        """A function to call from Python, with five integers; the GIL is released while it runs."""
        return _CALL(self.address)


_compiling = threading.Lock()


def stage(function: Callable[..., None]) -> Stage:
    """Makes a kernel whose arithmetic keeps its order."""
    return Stage(function, EXACT)


def sums(function: Callable[..., None]) -> Stage:
    """Makes a kernel whose sums may be regrouped."""
    return Stage(function, LOOSE)
