"""docs/reference/presets.md: what each shipped preset sets, read from its YAML and from what Hydra composes."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from pages.markdown import block, code, page, table
from pages.words import presets
from verl_rollout_corr.configuration.parser import parse, to_mapping

_INTRODUCTION = """
A preset is a YAML file in the Hydra group `rollout_corr`: one is switched on by `+rollout_corr=<name>`, several by
`'+rollout_corr=[<name>,<name>]'` (where two set the same key, the later one wins), and any value is overridden behind
it, as in `rollout_corr.reject.seq_mean_k3.upper=0.02`. Python has them by `load_preset`. Which one when:
[choosing](../choosing.md).

Every preset also sets what verl needs to be told (`rollout_corr_base.yaml`):
"""


def render() -> str:
    """The page."""
    sources = {name: _source(f"rollout_corr/{name}.yaml") for name in presets()}
    base = _source("rollout_corr_base.yaml").split("_self_", 1)[1]
    return page(
        "Presets",
        "conf/rollout_corr/*.yaml",
        _INTRODUCTION,
        block(base, "yaml"),
        table(
            ["preset", "mode", "weights", "reject"],
            ([f"[{name}](#{name})", *_row(to_mapping(config))] for name, config in presets().items()),
        ),
        *(_section(name, text) for name, text in sources.items()),
    )


def _source(path: str) -> str:
    return files("verl_rollout_corr").joinpath("conf", *path.split("/")).read_text(encoding="utf-8")


def _row(node: dict[str, Any]) -> list[str]:
    weights = node["weights"]
    mode = node["mode"] if node["mode"] == "decoupled" else f"{node['mode']}, {node['loss']}"
    level = f"{weights['level']}{_band(weights)}" if weights["level"] else ""
    if weights["outside"] == "mask":
        level += ", 0 outside"
    reject = [
        f"{name}{_band(bounds)}{' if ' + bounds['when'] if bounds['when'] else ''}"
        for name, bounds in node["reject"].items()
    ]
    return [mode, level, "; ".join(reject)]


def _band(bounds: dict[str, Any]) -> str:
    lower, upper = bounds["lower"], bounds["upper"]
    if lower is None:
        return "" if upper is None else f" <= {upper:g}"
    return f" >= {lower:g}" if upper is None else f" in [{lower:g}, {upper:g}]"


def _section(name: str, text: str) -> str:
    """What the file says about itself, and the keys in which it differs from a node without a preset."""
    comment = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#")][1:]
    parts = text.split("\nrollout_corr:\n", 1)
    sets = block(f"rollout_corr:\n{parts[1]}", "yaml") if len(parts) == 2 else "It sets no key of `rollout_corr`."
    changed = ", ".join(f"{code(key)}: {value}" for key, value in _changes(name)) or "nothing"
    return f"## {name}\n\n{' '.join(comment)}\n\n{sets}\n\nDiffers from the defaults in: {changed}."


def _changes(name: str) -> list[tuple[str, str]]:
    plain, node = _flat(to_mapping(parse({}))), _flat(to_mapping(presets()[name]))
    return [(key, _shown(value)) for key, value in node.items() if plain.get(key) != value and key != "presets"]


def _flat(node: dict[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in node.items():
        flat |= _flat(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": value}
    return flat


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
