"""Whether the functions of this package in this process are those of its files: nothing has put another one in the
place of `decide`, of a statistic, or of a check.

In bypass mode the actors decide, and nobody else knows the log-probs that they decide on. A decision that another
function made there cannot be recognised by its result, so the functions themselves are looked at: their code, and what
a name stands for that one module imports from another.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, cast

from verl_rollout_corr.errors import HookError

_PACKAGE = "verl_rollout_corr"
_DECIDES = tuple(f"{_PACKAGE}.{folder}." for folder in ("grammar", "maths", "kernels", "hooks"))
_ALSO = (f"{_PACKAGE}.grammar", f"{_PACKAGE}.configuration.parser", f"{_PACKAGE}.configuration.node")
_ONLY_AT_THE_START = (f"{_PACKAGE}.hooks.plugin", f"{_PACKAGE}.hooks.compat", f"{_PACKAGE}.hooks.asked")
"""Modules that have done their work when the first update comes: a profiler may put a clock into them."""

_CONTEXT_MANAGER = contextlib.contextmanager(lambda: iter(())).__code__  # type: ignore[attr-defined]
_IS_FUNCTION = 0x2  # CO_NEWLOCALS: set for a function's code and not for a class's


class _Bound(NamedTuple):
    """What a name stands for: `where` says so to a reader, `owner` holds it, and `function`, with its code, is inside
    of the value.
    """

    where: str
    owner: Mapping[str, Any]
    name: str
    value: Any
    function: FunctionType | None = None
    code: CodeType | None = None


_seen: dict[str, list[_Bound]] = {}
"""By module, what was found to be as its file says."""


def check(who: str) -> None:
    """Raises HookError if a function of this package in this process is another one than its file says. `who` is this
    process.

    A module is compared with its file once, and from then on with what was found there: that takes microseconds.
    """
    for module in _deciding():
        found = _seen.get(module.__name__)
        if found is None:
            found = _seen[module.__name__] = list(_compared(module, who))
        for where, owner, name, value, function, code in found:
            if owner.get(name) is not value or (function is not None and function.__code__ is not code):
                raise _replaced(who, where, owner.get(name))


def _deciding() -> list[ModuleType]:
    """The modules of this process that decide, apply a decision or check that it was applied."""
    return [
        module
        for name, module in sys.modules.copy().items()
        if (name in _ALSO or name.startswith(_DECIDES)) and name not in _ONLY_AT_THE_START and _spec(module) is not None
    ]


def _spec(module: ModuleType) -> Any:
    spec = getattr(module, "__spec__", None)
    return None if spec is None or not hasattr(spec.loader, "get_code") else spec


def _compared(module: ModuleType, who: str) -> Iterator[_Bound]:
    code = _spec(module).loader.get_code(module.__name__)
    yield from _definitions(module.__name__, vars(module), [code], who)
    imported = list(_imports(code))
    for home, name, alias in imported:
        if alias in vars(module) and home.partition(".")[0] == _PACKAGE:
            value = vars(module)[alias]
            if value is not _imported(home, name):
                raise _replaced(who, f"{module.__name__}.{alias}", value)
            yield _Bound(f"{module.__name__}.{alias}", vars(module), alias, value)
    yield from _constants(module, {alias for _, _, alias in imported})


def _definitions(where: str, owner: Mapping[str, Any], bodies: list[CodeType], who: str) -> Iterator[_Bound]:
    """The functions and the methods that a module or a class defines. A name may be defined in two branches."""
    written: dict[str, list[CodeType]] = {}
    for code in _codes(bodies):
        if not code.co_name.startswith("<"):
            written.setdefault(code.co_name, []).append(code)
    for name, codes in written.items():
        if _mangled(where, name) not in owner:
            continue  # a branch that did not run
        value = owner[_mangled(where, name)]
        classes = [code for code in codes if not code.co_flags & _IS_FUNCTION]
        if classes and isinstance(value, type):
            yield _Bound(f"{where}.{name}", owner, name, value)
            yield from _definitions(f"{where}.{name}", vars(value), classes, who)
            continue
        function = _function(value)
        if not isinstance(function, FunctionType) or not any(_same(function.__code__, code) for code in codes):
            raise _replaced(who, f"{where}.{name}", value)
        yield _Bound(f"{where}.{name}", owner, _mangled(where, name), value, function, function.__code__)


def _constants(module: ModuleType, imported: Collection[str]) -> Iterator[_Bound]:
    """The constants of a module and the rows of its tables, as they are: a file does not tell what they should be, so
    processes compare them with each other (`tables.py`).
    """
    for name, value in vars(module).items():
        if name.isupper() and name not in imported:
            yield _Bound(f"{module.__name__}.{name}", vars(module), name, value)
            if isinstance(value, Mapping):
                table = cast("Mapping[str, Any]", value)
                yield from (_Bound(f"{module.__name__}.{name}[{key}]", table, key, row) for key, row in table.items())


def _mangled(where: str, name: str) -> str:
    """A method named __x is stored under another name in its class."""
    inside = where.rpartition(".")[2]
    return f"_{inside.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name


def _codes(bodies: Iterable[CodeType]) -> Iterator[CodeType]:
    return (one for body in bodies for one in body.co_consts if isinstance(one, CodeType))


def _function(value: Any) -> Any:
    """The function inside of what a decorator of Python or of a compiler has made of it. A decorator of anybody else is
    not looked into: it could do anything.
    """
    while True:
        if isinstance(value, classmethod | staticmethod):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, functools.cached_property):
            value = value.func
        elif type(value) is _LRU or (isinstance(value, FunctionType) and value.__code__ is _CONTEXT_MANAGER):
            value = value.__wrapped__
        elif type(value).__module__.partition(".")[0] == "triton":
            value = getattr(value, "fn", None)
        elif type(value).__module__.startswith(f"{_PACKAGE}.kernels."):
            value = getattr(value, "function", None)
        else:
            return value


_LRU = type(functools.lru_cache(lambda: None))


def _same(one: CodeType, other: CodeType) -> bool:
    """Whether two codes do the same. `==` would compare line numbers too, and they tell nothing about that."""
    parts = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_flags", "co_argcount")
    return (
        all(getattr(one, part) == getattr(other, part) for part in parts)
        and len(one.co_consts) == len(other.co_consts)
        and all(map(_same_constant, one.co_consts, other.co_consts))
    )


def _same_constant(one: Any, other: Any) -> bool:
    if isinstance(one, CodeType) and isinstance(other, CodeType):
        return _same(one, other)
    return type(one) is type(other) and (one == other or (one != one and other != other))


def _imports(code: CodeType) -> Iterator[tuple[str, str, str]]:
    """What a module imports by name: the module, the name there and the name here."""
    home = name = ""
    for instruction in dis.get_instructions(code):
        match instruction.opname:
            case "IMPORT_NAME":
                home = instruction.argval
            case "IMPORT_FROM":
                name = instruction.argval
            case "STORE_NAME" if name:
                yield home, name, instruction.argval
                name = ""
            case _:
                name = ""


def _imported(home: str, name: str) -> Any:
    module = sys.modules.get(home)
    return getattr(module, name, None) if module is not None else None


def _replaced(who: str, where: str, found: Any) -> HookError:
    by = getattr(_function(found), "__code__", None)
    file = f", defined in {by.co_filename}" if by is not None else ""
    return HookError(
        f"rollout_corr: in {who} {where} is not what its file says{file}: something has put another function in its "
        "place (a module of VERL_USE_EXTERNAL_MODULES?), or the file was changed after this process had read it, so "
        "that nobody knows what would be decided. Remove the change and start again. The run stops before it trains on "
        "this update"
    )
