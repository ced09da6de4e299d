"""Kernels are Python: what they compute when they are compiled is what Python computes, and the rest is refused."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from verl_rollout_corr.kernels import machine, objects
from verl_rollout_corr.kernels.expressions import Function, TranslationError
from verl_rollout_corr.kernels.machine import EXACT, get, get_int, inline, put, put_int
from verl_rollout_corr.kernels.translation import module_of

# pyright: basic

THIRD = 1 / 3


def text(function: Callable[..., Any]) -> str:
    """The function in LLVM's language."""
    return str(module_of("kernel", Function(function, EXACT)))  # type: ignore[arg-type]


def compiled(function: Callable[..., Any]) -> Callable[..., None]:
    """The function, compiled, of the address of its cells and an integer."""
    address = objects.linked("kernel", objects.compiled(text(function)))
    return ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(address)


def interpreted(function: Callable[..., Any]) -> Callable[[np.ndarray, int], None]:
    """The function as Python runs it, with memory that is an array."""

    names: dict[str, Any] = dict(globals())
    for name, value in globals().items():
        if isinstance(value, Function):
            names[name] = FunctionType(value.function.__code__, names)
    names |= {
        "get": lambda cells, index: float(cells[index]),
        "get_int": lambda cells, index: int(cells.view(np.int64)[index]),
        "put": lambda cells, index, value: cells.__setitem__(index, value),
        "put_int": lambda cells, index, value: cells.view(np.int64).__setitem__(index, value),
    }
    return FunctionType(function.__code__, names)


@inline
def parts(x, certain):
    """Two results, by one of two returns."""
    if certain:
        return x * THIRD, x - 1.0
    return 0.0, x


@inline
def sign(x):
    """Returns within an if."""
    if x < 0.0:
        return -1.0
    if x > 0.0:
        return 1.0
    return 0.0


def arithmetic(cells, n):
    x, y = get(cells, 0), get(cells, 1)
    put(cells, 2, x + y * 3 - -x / 4)
    put(cells, 3, abs(x - y) + min(x, y) - max(x, 2) + n / 2)
    put(cells, 4, (x if x > y else y) + (1 if n == 3 else 0.5) + float(n))
    put(cells, 5, math.sqrt(2.0) * THIRD + (x != x) + (y <= y) + math.pi)
    put_int(cells, 6, (n << 3) | 1)
    put_int(cells, 7, ((n * 7 - 50) >> 1) & 255)
    put_int(cells, 8, abs(n - 10) ^ 5)
    put_int(cells, 9, (x < y) + (y < x) + (not x < y) + get_int(cells, 8))
    put(cells, 10, sign(x) + sign(-y) + sign(0.0))
    put(cells, 11, parts(x, True)[0] + parts(x, False)[1])


def loops(cells, n):
    total, count, some = 0.0, 0, False
    for i in range(n):
        if i == 2:
            continue
        total += get(cells, i)
        some |= get(cells, i) > 1.0
    for i in range(1, 12, 4):
        count += i
        if count > 5:
            break
    at = 0
    while at < n and get(cells, at) < 1.0:
        at += 1
    position = 20
    while position > n or position > 15:
        position -= 1
    third, less = parts(total, n > 2)
    put(cells, 12, total + third - less)
    put_int(cells, 13, count + some)
    put_int(cells, 14, at * 100 + position)


@pytest.mark.parametrize("n", [0, 1, 3, 5])
@pytest.mark.parametrize("function", [arithmetic, loops])
def test_what_python_computes(function: Callable[..., Any], n: int) -> None:
    """Every statement and expression of the language, bit for bit or by a rounding (a fused product)."""
    ours = np.array([0.75, -1.5, 0.5, 1.25, 8.0, *range(20)])
    pythons = ours.copy()
    compiled(function)(ours.ctypes.data, n)
    interpreted(function)(pythons, n)
    np.testing.assert_allclose(ours, pythons, rtol=1e-15)


def test_a_constant_condition_leaves_one_side() -> None:
    """So a kernel for usual tokens contains nothing of the one for unusual ones."""
    assert "fdiv" not in text(one_side) and "fdiv" in text(two_sides)


@inline
def either(x, usual):
    """Divides only what is unusual."""
    if not usual:
        return 1.0 / x
    return x if usual else 1.0 / x


def one_side(cells, n):
    put(cells, 0, either(get(cells, 1), True))


def two_sides(cells, n):
    put(cells, 0, either(get(cells, 1), n > 0))


def test_python_alone_reads_what_stands_behind_and() -> None:
    """`and` looks at its right side only if the left one holds: the address 0 is not read."""
    cells = np.zeros(2)
    compiled(guarded)(cells.ctypes.data, 0)
    assert cells[1] == 2.0


def guarded(cells, n):
    if n != 0 and get(n, 0) > 0.0:
        put(cells, 1, 1.0)
    else:
        put(cells, 1, 2.0)


def bad_statement(cells, n):
    assert n


def bad_expression(cells, n):
    put(cells, 0, [n])


def bad_chain(cells, n):
    put_int(cells, 0, 0 < n < 3)


def bad_name(cells, n):
    put(cells, 0, nowhere)  # noqa: F821 # pyright: ignore


def bad_condition(cells, n):
    if n:
        put(cells, 0, 1.0)


def bad_loop(cells, n):
    for i in (1, 2):
        put(cells, i, 1.0)


def bad_type(cells, n):
    total = 0
    total += get(cells, 0)
    put(cells, 0, total)


def bad_operator(cells, n):
    put_int(cells, 0, n % 3)


def bad_function(cells, n):
    put(cells, 0, math.exp(get(cells, 0)))


def bad_target(cells, n):
    cells[0] = n


def bad_constant(cells, n):
    put(cells, 0, machine.EXACT)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (bad_statement, r"test_translation.py:\d+: this statement is not translated: assert n"),
        (bad_expression, r"this expression is not translated: \[n\]"),
        (bad_chain, "comparisons are not chained: 0 < n < 3"),
        (bad_name, "this name has no value: nowhere"),
        (bad_condition, "a condition has to be a comparison: n"),
        (bad_loop, r"only a range is looped over"),
        (bad_type, "bad_type: total is i64 and cannot be double"),
        (bad_operator, "this operator is not translated: n % 3"),
        (bad_function, r"this function is not translated: math.exp\(get\(cells, 0\)\)"),
        (bad_target, r"only names are assigned to: cells\[0\] = n"),
        (bad_constant, "only numbers are constants: machine.EXACT"),
    ],
)
def test_the_rest_is_refused(function: Callable[..., Any], message: str) -> None:
    """With the place, and what stands there."""
    with pytest.raises(TranslationError, match=message):
        text(function)
