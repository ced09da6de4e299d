"""The presets' own YAML files: what they set, and what they say about themselves in their comments."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from verl_rollout_corr.configuration.parser import parse, to_mapping

_FOLDER = files("verl_rollout_corr") / "conf" / "rollout_corr"
_BASE = "/rollout_corr_base"
_MARKS = ("Source", "When", "Not when")


@dataclass(frozen=True)
class PresetNotes:
    """The comment of a preset: what it does, its source, when to take it and when not; "" where it does not say."""

    name: str
    does: str
    source: str
    when: str
    not_when: str


def notes_of(name: str) -> PresetNotes | None:
    """The comment of a preset that comes with the package; None for any other name."""
    return _read(name, preset_text(name)) if name in shipped_names() else None


def preset_text(name: str) -> str:
    """The file of a preset that comes with the package."""
    return (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")


def written_node(name: str, text: str) -> dict[str, Any] | None:
    """A preset's file as a complete mapping; None where it builds on another preset, which Hydra has to compose."""
    from yaml import safe_load

    written = safe_load(text)
    if [one for one in written["defaults"] if one != "_self_"] != [_BASE]:
        return None
    return to_mapping(parse({**(written.get("rollout_corr") or {}), "presets": [name]}))


def written_nodes() -> dict[str, dict[str, Any]]:
    """Those of the presets that come with the package and build on no other."""
    nodes = {name: written_node(name, preset_text(name)) for name in shipped_names()}
    return {name: node for name, node in nodes.items() if node is not None}


def shipped_names() -> tuple[str, ...]:
    """The presets that come with the package, in the order of the alphabet, without asking Hydra."""
    return tuple(
        sorted(entry.name.removesuffix(".yaml") for entry in _FOLDER.iterdir() if entry.name.endswith(".yaml"))
    )


def _read(name: str, text: str) -> PresetNotes:
    said = dict.fromkeys(("", *_MARKS), "")
    mark = ""
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        content = line.removeprefix("#").strip()
        if content.startswith("@package"):
            continue
        head, colon, rest = content.partition(": ")
        if colon and head in _MARKS:
            mark, content = head, rest
        said[mark] = f"{said[mark]} {content}".strip()
    return PresetNotes(name, said[""], said["Source"], said["When"], said["Not when"])
