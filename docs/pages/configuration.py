"""docs/reference/configuration.md: every key of the node `rollout_corr`, and what the parser says to a wrong value."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from enum import Enum
from typing import Any

from pages.markdown import block, code, page, sentences, table
from pages.source import words
from verl_rollout_corr import ConfigError, grammar
from verl_rollout_corr.configuration.parser import parse, to_mapping

_NUMBER = "a number above 0, or null"
_COUNT = "a whole number of at least 1"

# type, meaning. What a choice is about is the docstring of its enum; a word's meaning is the string under it.
_KEYS: dict[str, tuple[type[Enum] | str, str]] = {
    "mode": (grammar.Mode, ""),
    "loss": (grammar.Loss, ""),
    "weights.level": (
        grammar.Level,
        " Each: [weights](weights.md#levels). null: no weights; bounds, `normalize` and `outside: mask` would then "
        "have no effect and are refused.",
    ),
    "weights.lower": (_NUMBER, "The smallest weight, inclusive."),
    "weights.upper": (_NUMBER, "The largest weight, inclusive."),
    "weights.outside": (grammar.Outside, ""),
    "weights.normalize": (grammar.Normalize, " null: by nothing."),
    "reject": ("criteria by name", "A token must pass every one. Names: [criteria](criteria.md)."),
    "reject.<name>.lower": (
        _NUMBER,
        "The smallest ratio that passes, inclusive. Of k1 only, and not in the batch scope.",
    ),
    "reject.<name>.upper": (
        f"{_NUMBER}; of lag a whole number of at least 0",
        "The largest ratio (k1), statistic or lag that passes, inclusive.",
    ),
    "reject.<name>.when": (grammar.When, " null: all units."),
    "min_group_kept": (
        f"{_COUNT}, or null",
        "Reject whole groups in which fewer sequences than this have a kept token.",
    ),
    "denominator": (grammar.Denominator, ""),
    "baseline": (grammar.Baseline, ""),
    "invalid": (grammar.Invalid, ""),
    "metrics": (grammar.Metrics, ""),
    "dump.dir": (
        "a path, or null",
        "Where each update of the actor is written, as Parquet: [dumps](../dump.md). null: nowhere.",
    ),
    "dump.every": (_COUNT, "Every how many steps, the first among them."),
    "dump.max_gb": (
        _NUMBER,
        "How many GB (10^9 bytes) the directory may hold; then no more is written, with a warning.",
    ),
    "presets": ("names", "Filled in by the run itself; leave it out."),
}

_REFUSED: tuple[Mapping[str, Any], ...] = (
    {"weight": {"level": "token"}},
    {"rollout_rs": "seq_mean_k3"},
    {"mode": "bypas"},
    {"weights": {"level": "geometric"}},
    {"weights": {"level": "token", "upper": 0}},
    {"weights": {"level": "token", "upper": "2.0"}},
    {"weights": {"level": "token", "upper": "0.5_5"}},
    {"weights": {"level": "token", "lower": 3, "upper": 2}},
    {"weights": {"level": "token", "outside": "mask"}},
    {"weights": {"upper": 2}},
    {"reject": {"sequence": {"upper": 2}}},
    {"reject": {"seq_mean_k3": None}},
    {"reject": {"seq_mean_k3": {}}},
    {"reject": {"seq_mean_k3": {"lower": 0.5}}},
    {"reject": {"batch_mean_k1": {"lower": 0.5}}},
    {"reject": {"seq_mean_k1": {"upper": float("inf")}}},
    {"reject": {"seq_mean_k1": {"lower": 0.5, "when": "negative"}}},
    {"loss": "reinforce"},
    {"mode": "bypass", "weights": {"level": "token"}},
    {"mode": "bypass", "loss": "reinforce", "weights": {"level": "token", "normalize": "batch"}},
    {"mode": "bypass", "reject": {"batch_mean_k2": {"upper": 0.02}}},
    {"mode": "bypass", "min_group_kept": 2},
    {"mode": "bypass", "denominator": "kept"},
    {"mode": "bypass", "baseline": "kept"},
    {"baseline": "kept", "reject": {"seq_mean_k1": {"lower": 0.6, "when": "negative_advantage"}}},
    {"baseline": "kept", "reject": {"lag": {"upper": 1}}},
    {"reject": {"lag": {"upper": 0.5}}},
    {"min_group_kept": 0},
    {"invalid": True},
    {"dump": {"every": 0}},
)

_INTRODUCTION = """
The node `rollout_corr`. Absent keys take their defaults. What cannot be run is refused when the configuration is
composed, before any worker starts, with a message that names the key, the value found and what to write instead.
"""


def render() -> str:
    """The page."""
    defaults = _defaults(to_mapping(parse({})))
    found = [key for key in _KEYS if not key.startswith("reject.")]
    if found != list(defaults):
        raise SystemExit(f"docs/pages/configuration.py describes {found}, and the node has {list(defaults)}")
    return page(
        "Configuration",
        "grammar/words.py and parser.py",
        _INTRODUCTION,
        table(["key", "default", "allowed", "meaning"], (_row(key, defaults) for key in _KEYS)),
        "## Words",
        table(["key", "word", "meaning"], _words()),
        "## What is refused",
        "One example of each kind, with what the parser says. What depends on the rest of verl's configuration is "
        "under [errors](errors.md).",
        *(_refusal(mapping) for mapping in _REFUSED),
    )


def _defaults(node: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in node.items():
        values |= _defaults(value, f"{path}{key}.") if isinstance(value, dict) and value else {f"{path}{key}": value}
    return values


def _row(key: str, defaults: Mapping[str, Any]) -> list[str]:
    kind, meaning = _KEYS[key]
    default = defaults.get(key)
    shown = code("null" if default is None else default)
    if isinstance(kind, str):
        return [code(key), shown, kind, meaning]
    allowed = ", ".join(map(code, kind)) + (", null" if default is None else "")
    return [code(key), shown, allowed, sentences(inspect.getdoc(kind) or "") + meaning]


def _words() -> list[list[str]]:
    kinds = {key: kind for key, (kind, _) in _KEYS.items() if not isinstance(kind, str) and kind is not grammar.Level}
    return [[code(key), code(word), meaning] for key, kind in kinds.items() for word, meaning in words(kind).items()]


def _refusal(mapping: Mapping[str, Any]) -> str:
    try:
        parse(mapping)
    except ConfigError as error:
        return block(f"rollout_corr: {_flow(mapping)}\n{error}", "text")
    raise SystemExit(f"docs/pages/configuration.py lists {mapping} as refused, and the parser accepts it")


def _flow(value: object) -> str:
    """YAML's one-line form."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_flow(item)}" for key, item in value.items()) + "}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value) if isinstance(value, str) and value[:1].isdigit() else str(value)
