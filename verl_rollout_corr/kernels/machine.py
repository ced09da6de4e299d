"""What Python lacks: memory by address, the bits of a number, reductions that vectorise, calls by address.

Kernels get plain addresses (int64) instead of arrays. So one signature serves every dtype and stride, and LLVM can
prove that two slots of one scratch memory do not overlap, which it cannot prove for a dozen arrays.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import llvmlite.ir as ir

from verl_rollout_corr.kernels.expressions import F64, I64, VOID, Function, Instruction

_F32 = ir.FloatType()
_I32, _I16, _I8 = (ir.IntType(bits) for bits in (32, 16, 8))

EXACT = ("contract",)
"""What the compiler may do with arithmetic whose order matters, as in an exponential: fuse a product and a sum."""

LOOSE = ("reassoc", "contract", "nsz", "arcp", "nnan")
"""With sums, which vectorise if they may be regrouped. They never get a NaN; infinities are kept."""


def inline(function: Callable[..., Any]) -> Any:
    """A function that becomes part of its callers and keeps the order of its arithmetic there."""
    return Function(cast(Any, function), EXACT)


def inline_sums(function: Callable[..., Any]) -> Any:
    """A function that becomes part of its callers, and whose sums may be regrouped."""
    return Function(cast(Any, function), LOOSE)


def _reader(result: ir.Type, memory: ir.Type, widen: Callable[[Any, Any], Any] | None = None) -> Any:
    def generate(builder: Any, address: Any, index: Any) -> Any:
        pointer = builder.inttoptr(address, ir.PointerType(memory))
        value = builder.load(builder.gep(pointer, [index]))
        return value if widen is None else widen(builder, value)

    return Instruction(result, (I64, I64), generate)


def _writer(argument: ir.Type, memory: ir.Type, narrow: Callable[[Any, Any], Any] | None = None) -> Any:
    def generate(builder: Any, address: Any, index: Any, value: Any) -> None:
        pointer = builder.inttoptr(address, ir.PointerType(memory))
        builder.store(value if narrow is None else narrow(builder, value), builder.gep(pointer, [index]))

    return Instruction(VOID, (I64, I64, argument), generate)


def _from_bfloat16(builder: Any, value: Any) -> Any:
    bits = builder.shl(builder.zext(value, _I32), ir.Constant(_I32, 16))
    return builder.fpext(builder.bitcast(bits, _F32), F64)


def _from_float16(builder: Any, value: Any) -> Any:
    """By shifting the bits into a float32 and scaling, which is exact for subnormal numbers too."""
    wide = builder.zext(value, _I32)
    shifted = builder.shl(builder.and_(wide, ir.Constant(_I32, 0x7FFF)), ir.Constant(_I32, 13))
    special = builder.icmp_unsigned(">=", shifted, ir.Constant(_I32, 0x7C00 << 13))
    scaled = builder.fmul(builder.fpext(builder.bitcast(shifted, _F32), F64), ir.Constant(F64, 2.0**112))
    infinite = builder.bitcast(builder.or_(shifted, ir.Constant(_I32, 0x7F800000)), _F32)
    size = builder.select(special, builder.fpext(infinite, F64), scaled)
    negative = builder.icmp_unsigned("!=", builder.and_(wide, ir.Constant(_I32, 0x8000)), ir.Constant(_I32, 0))
    return builder.select(negative, builder.fneg(size), size)


def _wider(builder: Any, value: Any) -> Any:
    return builder.zext(value, I64)


get = _reader(F64, F64)
"""get(address, index): a float64."""
get_int = _reader(I64, I64)
get_float32 = _reader(F64, _F32, lambda builder, value: builder.fpext(value, F64))
get_bfloat16 = _reader(F64, _I16, _from_bfloat16)
get_float16 = _reader(F64, _I16, _from_float16)
get_int32 = _reader(I64, _I32, _wider)
get_int16 = _reader(I64, _I16, _wider)
get_int8 = _reader(I64, _I8, _wider)
put = _writer(F64, F64)
"""put(address, index, value): a float64."""
put_int = _writer(I64, I64)
put_float32 = _writer(F64, _F32, lambda builder, value: builder.fptrunc(value, _F32))
put_int32 = _writer(I64, _I32, lambda builder, value: builder.trunc(value, _I32))
put_int16 = _writer(I64, _I16, lambda builder, value: builder.trunc(value, _I16))
put_int8 = _writer(I64, _I8, lambda builder, value: builder.trunc(value, _I8))

bits_of: Any = Instruction(I64, (F64,), lambda builder, value: builder.bitcast(value, I64))
float_of: Any = Instruction(F64, (I64,), lambda builder, value: builder.bitcast(value, F64))


def _extreme(name: str) -> Any:
    def generate(builder: Any, one: Any, other: Any) -> Any:
        function = builder.module.declare_intrinsic(name, [F64], ir.FunctionType(F64, [F64, F64]))
        return builder.call(function, [one, other], fastmath=["nnan", "nsz"])

    return Instruction(F64, (F64, F64), generate)


def _fused(builder: Any, one: Any, other: Any, third: Any) -> Any:
    function = builder.module.declare_intrinsic("llvm.fmuladd", [F64], ir.FunctionType(F64, [F64, F64, F64]))
    return builder.call(function, [one, other, third])


fused: Any = Instruction(F64, (F64, F64, F64), _fused)
"""fused(a, b, c) is a b + c, rounded once where the processor can. (LLVM would compute a product that occurs twice only
once, and add with two more instructions.)"""

larger = _extreme("llvm.maxnum")
"""The larger of two numbers that are not NaN. (A reduction by Python's `max` does not vectorise.)"""
smaller = _extreme("llvm.minnum")


def _call(builder: Any, address: Any, *arguments: Any) -> None:
    kind = ir.FunctionType(VOID, [I64] * 5)
    builder.call(builder.inttoptr(address, kind.as_pointer()), arguments)


call: Any = Instruction(VOID, (I64,) * 6, _call)
"""call(address, work, totals, settings, first, count): the stage at an address."""


def _prefetch(builder: Any, address: Any) -> None:
    pointer = ir.PointerType(_I8)
    kind = ir.FunctionType(VOID, [pointer, _I32, _I32, _I32])
    function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
    near, of_memory = (ir.Constant(_I32, word) for word in (2, 1))
    builder.call(function, [builder.inttoptr(address, pointer), ir.Constant(_I32, 0), near, of_memory])


prefetch_line: Any = Instruction(VOID, (I64,), _prefetch)
"""Prefetches a cache line; harmless for an address outside of any memory."""


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
