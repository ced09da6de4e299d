"""The output of every verb: one record, as text for a person or as JSON for a program."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Mapping
from enum import Enum
from typing import Any

# Control characters, marks that turn the direction of text around, and halves of characters, which cannot be printed.
_STEERING = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_CONTROL, _CONTROL_OR_BREAK = re.compile(f"[{_STEERING}]"), re.compile(f"[{_STEERING}\t\n]")


def plain(text: str) -> str:
    """Text from a file that may come from a stranger. Control characters are made visible, so as not to act on the
    terminal.
    """
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def one_line(text: str) -> str:
    """The same for a name, which must not begin a line of its own."""
    return _CONTROL_OR_BREAK.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def as_json(value: Any) -> Any:
    """Turns dataclasses, enums and tuples into what JSON has; numbers that JSON lacks (NaN, infinity) become text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    text = json.dumps(as_json(value), indent=2, ensure_ascii=False, allow_nan=False)
    # JSON has words for what steers a terminal: the same document, which can be looked at.
    sys.stdout.write(_CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n")


def percent(share: float) -> str:
    """A share for a table: 0.03 is `3%`. A share that would only round to 0 or 100 % is `<1%` or `>99%`."""
    if 0 < share < 0.005:
        return "<1%"
    if 0.995 <= share < 1:
        return ">99%"
    return f"{share:.0%}"
