"""The constants and the tables of the definition in this process, compared with those of the trainer: the function of
each statistic, the bound of an exponent. They have no code of their own that `as_written.py` could look at.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import sys
from collections.abc import Mapping
from enum import Enum
from types import FunctionType
from typing import Any

from verl_rollout_corr.errors import HookError

_DEFINITION = ("verl_rollout_corr.grammar", "verl_rollout_corr.maths.")


@functools.lru_cache(maxsize=1)
def tables() -> Mapping[str, str]:
    """By module of the definition, a digest of its constants and tables: the function of each statistic, the bound of
    an exponent. `check` sees that they stay as they were.
    """
    found: dict[str, str] = {}
    for name, module in sys.modules.copy().items():
        if name.startswith(_DEFINITION):
            constants = {key: _said(value) for key, value in vars(module).items() if key.isupper()}
            found[name] = hashlib.sha256(repr(sorted(constants.items())).encode()).hexdigest()[:16]
    return found


def check_tables(who: str, theirs: Mapping[str, str]) -> None:
    """Raises HookError if the trainer, whose `tables` these are, has other ones than this process."""
    mine = tables()
    other = sorted(name for name in mine.keys() & theirs.keys() if mine[name] != theirs[name])
    if other:
        raise HookError(
            f"rollout_corr: {who} has other constants or tables in {other[0]} than the trainer, from the same files: "
            "something has changed them in one of the two processes (a module of VERL_USE_EXTERNAL_MODULES?), so that "
            "they may decide differently. Remove the change and start again. The run stops before it trains on this "
            "update"
        )


def _said(value: Any) -> str:
    """A text that is the same in every process."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_said(key)}:{_said(item)}" for key, item in value.items()) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ",".join(sorted(map(_said, value))) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_said, value)) + "]"
    if isinstance(value, FunctionType):
        code = value.__code__
        return f"{value.__module__}.{value.__qualname__}:{code.co_code.hex()}{_said(code.co_names + code.co_consts)}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__qualname__}({_said(tuple(vars(value).values()))})"
    if value is None or isinstance(value, int | float | str | bytes | Enum):
        return repr(value)
    return getattr(value, "__qualname__", type(value).__qualname__)
