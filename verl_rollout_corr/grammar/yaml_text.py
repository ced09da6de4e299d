"""Nested mappings as YAML, without a library for it."""

from __future__ import annotations

import json
from typing import Any, cast


def as_yaml(node: dict[str, Any], indent: str = "") -> str:
    """Block style for mappings. Numbers and texts are written as JSON writes them, which YAML 1.1 reads the same."""
    lines: list[str] = []
    for key, item in node.items():
        if isinstance(item, dict) and item:
            lines += [f"{indent}{key}:", as_yaml(cast("dict[str, Any]", item), indent + "  ")]
        else:
            lines.append(f"{indent}{key}: {_scalar(item)}")
    return "\n".join(lines)


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return value if value.replace("_", "").isalpha() and value not in _READ_AS_ELSE else json.dumps(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_scalar, cast('list[str]', value)))}]"
    text = json.dumps(value)
    # YAML 1.1, which PyYAML reads, takes 1e-05 for text, and 1.0e-05 for a number.
    return text.replace("e", ".0e") if isinstance(value, float) and "e" in text and "." not in text else text


_READ_AS_ELSE = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})
