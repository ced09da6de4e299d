"""What the presets' own YAML files say about themselves, in their comments."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

_FOLDER = files("verl_rollout_corr") / "conf" / "rollout_corr"
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
