"""What numba's Python lacks: memory by address, the bits of a number, reductions that vectorise, calls by address.

Kernels get plain addresses (int64) instead of arrays. So one signature serves every dtype and stride, and LLVM can
prove that two slots of one scratch memory do not overlap, which it cannot prove for a dozen arrays.
"""

# pyright: basic
from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import llvmlite.ir as ir
from numba import cfunc, njit, types
from numba.extending import intrinsic

from verl_rollout_corr.kernels import objects

_F64, _F32 = ir.DoubleType(), ir.FloatType()
_I64, _I32, _I16, _I8 = (ir.IntType(bits) for bits in (64, 32, 16, 8))

EXACT: dict[str, Any] = {"error_model": "numpy", "no_rewrites": True, "fastmath": {"contract"}}
"""Compiler flags for arithmetic whose order matters, as in an exponential."""

LOOSE: dict[str, Any] = {"error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz", "arcp", "nnan"}}
"""Compiler flags for sums, which vectorise if they may be regrouped. They never get a NaN; infinities are kept."""

_STAGE = types.void(*[types.int64] * 5)
_CALL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)


def _digest() -> str:
    package = Path(__file__).parents[1]
    sources = sorted(path for room in ("kernels", "maths") for path in (package / room).glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]


DIGEST = _digest()
"""A digest of all sources, because a kernel consists of functions of several files and constants of the maths."""


class Stage:
    """A kernel of five int64, f(work, sums, settings, first, count), loaded or compiled when it is first needed."""

    def __init__(self, function: Callable[..., None], options: dict[str, Any]) -> None:
        self._function, self._options = function, options
        module = function.__module__.rpartition(".")[2]
        self.name = f"{module}.{function.__qualname__}-{DIGEST}"
        self._compiled: Any = None

    @cached_property
    def address(self) -> int:
        """The address at which other kernels call it."""
        with _compiling:
            found = objects.load(self.name)
            if found is not None:
                return found
            self._compiled = cfunc(_STAGE, **self._options)(self._function)
            objects.save(self.name, self._compiled)
            return self._compiled.address

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


_PART: dict[str, Any] = {"forceinline": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""For functions that exist only within others: a third of the time that compiling takes."""


def inline(function: Callable[..., Any]) -> Any:
    """A function that becomes part of its callers and keeps the order of its arithmetic there."""
    return njit(**EXACT, **_PART)(function)


def inline_sums(function: Callable[..., Any]) -> Any:
    """A function that becomes part of its callers, and whose sums may be regrouped."""
    return njit(**LOOSE, **_PART)(function)


def _reader(result: Any, memory: ir.Type, widen: Callable[[Any, Any], Any] | None = None) -> Any:
    @intrinsic
    def read(typingctx: Any, address: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], ir.PointerType(memory))
            value = builder.load(builder.gep(pointer, [arguments[1]]))
            return value if widen is None else widen(builder, value)

        return result(types.int64, types.int64), generate

    return read


def _writer(argument: Any, memory: ir.Type, narrow: Callable[[Any, Any], Any] | None = None) -> Any:
    @intrinsic
    def write(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], ir.PointerType(memory))
            value = arguments[2] if narrow is None else narrow(builder, arguments[2])
            builder.store(value, builder.gep(pointer, [arguments[1]]))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, argument), generate

    return write


def _from_bfloat16(builder: Any, value: Any) -> Any:
    bits = builder.shl(builder.zext(value, _I32), ir.Constant(_I32, 16))
    return builder.fpext(builder.bitcast(bits, _F32), _F64)


def _from_float16(builder: Any, value: Any) -> Any:
    """By shifting the bits into a float32 and scaling, which is exact for subnormal numbers too."""
    wide = builder.zext(value, _I32)
    shifted = builder.shl(builder.and_(wide, ir.Constant(_I32, 0x7FFF)), ir.Constant(_I32, 13))
    special = builder.icmp_unsigned(">=", shifted, ir.Constant(_I32, 0x7C00 << 13))
    scaled = builder.fmul(builder.fpext(builder.bitcast(shifted, _F32), _F64), ir.Constant(_F64, 2.0**112))
    infinite = builder.bitcast(builder.or_(shifted, ir.Constant(_I32, 0x7F800000)), _F32)
    size = builder.select(special, builder.fpext(infinite, _F64), scaled)
    negative = builder.icmp_unsigned("!=", builder.and_(wide, ir.Constant(_I32, 0x8000)), ir.Constant(_I32, 0))
    return builder.select(negative, builder.fneg(size), size)


get = _reader(types.float64, _F64)
"""get(address, index): a float64."""
get_int = _reader(types.int64, _I64)
get_float32 = _reader(types.float64, _F32, lambda builder, value: builder.fpext(value, _F64))
get_bfloat16 = _reader(types.float64, _I16, _from_bfloat16)
get_float16 = _reader(types.float64, _I16, _from_float16)
get_int32 = _reader(types.int64, _I32, lambda builder, value: builder.zext(value, _I64))
get_int16 = _reader(types.int64, _I16, lambda builder, value: builder.zext(value, _I64))
get_int8 = _reader(types.int64, _I8, lambda builder, value: builder.zext(value, _I64))
put = _writer(types.float64, _F64)
"""put(address, index, value): a float64."""
put_int = _writer(types.int64, _I64)
put_float32 = _writer(types.float64, _F32, lambda builder, value: builder.fptrunc(value, _F32))
put_int32 = _writer(types.int64, _I32, lambda builder, value: builder.trunc(value, _I32))
put_int16 = _writer(types.int64, _I16, lambda builder, value: builder.trunc(value, _I16))
put_int8 = _writer(types.int64, _I8, lambda builder, value: builder.trunc(value, _I8))


def _cast(result: Any, argument: Any, memory: ir.Type) -> Any:
    @intrinsic
    def cast(typingctx: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], memory)

        return result(argument), generate

    return cast


bits_of = _cast(types.int64, types.float64, _I64)
float_of = _cast(types.float64, types.int64, _F64)


def _extreme(name: str) -> Any:
    @intrinsic
    def extreme(typingctx: Any, one: Any, other: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = ir.FunctionType(_F64, [_F64, _F64])
            function = builder.module.declare_intrinsic(name, [_F64], kind)
            return builder.call(function, arguments, fastmath=["nnan", "nsz"])

        return types.float64(types.float64, types.float64), generate

    return extreme


larger = _extreme("llvm.maxnum")
"""The larger of two numbers that are not NaN. (A reduction by Python's `max` does not vectorise.)"""
smaller = _extreme("llvm.minnum")


def _call(typingctx: Any, address: Any, work: Any, totals: Any, settings: Any, first: Any, count: Any) -> Any:
    """Calls the stage at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_I64] * 5)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


call: Any = intrinsic(_call)


def _prefetch(typingctx: Any, address: Any) -> Any:
    """Prefetches a cache line; harmless for an address outside of any memory."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = ir.PointerType(_I8)
        kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        line = builder.inttoptr(arguments[0], pointer)
        near, of_memory = (ir.Constant(_I32, word) for word in (2, 1))
        builder.call(function, [line, ir.Constant(_I32, 0), near, of_memory])
        return context.get_dummy_value()

    return types.void(types.int64), generate


prefetch_line: Any = intrinsic(_prefetch)


@inline
def prefetch(address: int, count: int) -> None:
    """Prefetches the cache lines of `count` bytes."""
    for line in range(0, count, 64):
        prefetch_line(address + line)


@inline
def clear(address: int, count: int) -> None:
    """Writes `count` zero bytes."""
    for index in range(count):
        put_int8(address, index, 0)


@inline
def add(address: int, index: int, value: float) -> None:
    """Adds to a float64 in memory."""
    put(address, index, get(address, index) + value)


@inline
def bump(address, word, value):
    """Adds to an int64 in memory."""
    put_int(address, word, get_int(address, word) + value)
