"""Keys that were probably meant for us and are misspelt. Hydra takes any `+key=value`, and nothing would read it.

Standard library only. A composed configuration is searched as plain mappings. Verl's own keys are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, cast

from verl_rollout_corr.configuration.node import shown
from verl_rollout_corr.errors import Problem
from verl_rollout_corr.grammar import Baseline, Denominator, Level

GROUP = "rollout_corr"
"""The name of the group of presets and of the node."""

_NEAR = ("rolloutcorr", "rolloutcorrection", "verlrolloutcorr")
# Not the words that begin alike and mean something else: correct, correctness, correlation, corrupt, correspond.
_CONTAINS = re.compile(r"rolloutcorr(?!ect(?!ion)|el|up|esp)")
_SECTIONS = frozenset({"weights", "reject", "min_group_kept", "denominator", "baseline"})
_REJECT = "reject"
_BOUND_KEYS = frozenset({"lower", "upper", "when"})
_NOT_MISSPELT = frozenset({GROUP, "actor_rollout_ref.actor.policy_loss.rollout_corr"})
"""Our node, and where presets hand our configuration to the actors."""
_VERLS_OWN = frozenset({"algorithm.rollout_correction", "actor_rollout_ref.actor.policy_loss.rollout_correction"})
"""verl's own correction, which reads none of our words and no preset of ours."""


@dataclass(frozen=True)
class Suspect:
    """A key that nothing reads and that was probably meant for us. `place` is where its value belongs in our node."""

    path: str
    value: object
    place: str = ""

    def problem(self, presets: Collection[str], is_on: bool = False) -> Problem:
        """What to write instead. `is_on`: whether the run has a preset, spelt right."""
        if self.place and is_on:
            found = f"is {shown(self.value)} and not below {GROUP}, so that nothing reads it."
            return Problem(self.path, found, f"Write {' '.join(self._overrides())}, or choose another name.")
        named = named_presets(self.value, presets)
        group = f"+{GROUP}={named[0] if len(named) == 1 else '[' + ','.join(named) + ']' if named else '<preset>'}"
        write = f"Did you mean {GROUP}? Write {group}"
        values = self._overrides()
        if values:
            write += f" and {' '.join(values)}"
        return Problem(
            self.path,
            f"is {shown(self.value)}: this is not the group {GROUP}, so that it chooses no preset and nothing would be "
            "corrected.",
            f"{write}; in a YAML file, a line `- {GROUP}: <preset>` of its defaults. If it has nothing to do with "
            f"rollout correction, choose another name or value, or add +{GROUP}=null.",
        )

    def _overrides(self) -> list[str]:
        """The first of its values where they belong."""
        value = self.value
        if isinstance(value, Mapping):
            values = list(_values(cast("Mapping[str, Any]", value), self.place))
        else:
            values = [(self.place, shown(value).strip("'"))] if self.place else []
        return [f"++{GROUP}.{key}={text}" for key, text in values[:4]]


@dataclass(frozen=True)
class Words:
    """Our names of presets and criteria. `presets` are those that the run does not use already. With a preset on, the
    criteria are spelt right somewhere, and are suspicious at the root only.
    """

    presets: Collection[str]
    criteria: Collection[str]
    is_on: bool = False


def suspects(composed: Mapping[str, Any], ours: Words, is_added: Callable[[str], bool]) -> list[Suspect]:
    """The keys of a composed configuration, without `hydra`, that were probably meant for us.

    Args:
        composed: plain nested mappings.
        ours: what a key or a value can be recognised by, beside its likeness to `rollout_corr`.
        is_added: whether a dotted key is the user's own and not verl's; asked only about values that name a preset.
    """
    return list(_suspects(composed, "", ours, is_added))


def named_presets(value: object, presets: Collection[str]) -> list[str]:
    """The presets that a value names: `k3_rs`, `[token_is, k3_rs]` or `token_is,k3_rs`. Empty if it contains anything
    else.
    """
    names = value.strip().strip("[]").split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple):
        return []
    listed = cast("list[object]", names)
    words = [_as_written(name.strip().removesuffix(".yaml"), presets) for name in listed if isinstance(name, str)]
    return words if words and len(words) == len(listed) and all(word in presets for word in words) else []


def _as_written(name: str, presets: Collection[str]) -> str:
    """A preset's name for one in other letters, as K3_RS or k3-rs; a name of one word may be anyone's."""
    folded = name.lower().replace("-", "_")
    return folded if "_" in folded and folded in presets else name


def _suspects(node: Mapping[str, Any], path: str, ours: Words, is_added: Callable[[str], bool]) -> Iterator[Suspect]:
    for key, value in cast("Mapping[str, object]", node).items():
        here = f"{path}.{key}" if path else str(key)
        if here in _NOT_MISSPELT:
            continue
        if here in _VERLS_OWN:
            yield from _in_verls_own(here, value, ours)
            continue
        near = any(_is_near(part, value, ours.presets) for part in re.split(r"[./@ ]", str(key)))
        if near:
            yield Suspect(here, value)
        elif key in ours.criteria and _has_bounds(value) and (path == _REJECT or not ours.is_on):
            yield Suspect(here, value, f"{_REJECT}.{key}")
        elif not path and _is_section(str(key), value) and is_added(here):  # the name of the node was forgotten
            yield Suspect(here, value, str(key))
        elif not path and key in ours.presets and is_added(here):  # `+k3_rs=true`
            yield Suspect(here, key)
        elif isinstance(value, Mapping):
            yield from _suspects(cast("Mapping[str, Any]", value), here, ours, is_added)
        elif named_presets(value, ours.presets) and is_added(here):
            yield Suspect(here, value)
        elif isinstance(value, list):
            for i, item in enumerate(cast("list[object]", value)):
                if isinstance(item, Mapping):
                    yield from _suspects(cast("Mapping[str, Any]", item), f"{here}.{i}", ours, is_added)


def _in_verls_own(path: str, value: object, ours: Words) -> Iterator[Suspect]:
    """Presets and sections of ours below verl's own correction, and a preset in its place."""
    if not isinstance(value, Mapping):
        if named_presets(value, ours.presets):
            yield Suspect(path, value)
        return
    mine: dict[str, object] = {}
    for key, inner in cast("Mapping[str, object]", value).items():
        if key in _SECTIONS or (key in ours.criteria and _has_bounds(inner)):
            mine[key] = inner
        elif named_presets(inner, ours.presets):
            yield Suspect(f"{path}.{key}", inner)
    if mine:
        yield Suspect(path, mine)


def _is_near(name: str, value: object, presets: Collection[str]) -> bool:
    letters = re.sub(r"[-_\s]", "", name.lower())
    if _CONTAINS.search(letters):
        return True
    differing = min(_differing(letters, ours) for ours in _NEAR)
    # A number is not a preset: `rollout_cores: 8` is somebody else's.
    if differing <= 2:
        return not isinstance(value, bool | int | float)
    return differing <= 4 and _looks_like_ours(value, presets)


def _differing(one: str, other: str) -> int:
    """Letters without a counterpart, of both words: 1 for a missing or an added letter, 2 for a wrong one."""
    return round((1 - SequenceMatcher(None, one, other).ratio()) * len(one + other))


def _looks_like_ours(value: object, presets: Collection[str]) -> bool:
    if isinstance(value, Mapping):
        return any(key in _SECTIONS for key in cast("Mapping[str, Any]", value))
    return value is None or bool(named_presets(value, presets))


def _is_section(key: str, value: object) -> bool:
    """Whether a value at the root is one that our node has below this key, and hardly anybody else has."""
    if key == "weights":
        return isinstance(value, Mapping) and cast("Mapping[str, object]", value).get("level") in list(Level)
    if key == "min_group_kept":
        return True
    return value in {"denominator": list(Denominator), "baseline": list(Baseline)}.get(key, [])


def _has_bounds(value: object) -> bool:
    return isinstance(value, Mapping) and bool(_BOUND_KEYS & set(cast("Any", value)))


def _values(node: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    for key, value in node.items():
        here = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping):
            yield from _values(cast("Mapping[str, Any]", value), here)
        else:
            yield here, shown(value).strip("'")
