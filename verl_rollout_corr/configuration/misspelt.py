"""Keys that were probably meant for us and are misspelt. Hydra takes any `+key=value`, and nothing would read it.

Standard library only. A composed configuration is searched as plain mappings. Verl's own keys are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, cast

from verl_rollout_corr.configuration.node import mapping, shown
from verl_rollout_corr.errors import Problem
from verl_rollout_corr.grammar import Baseline, Denominator, Invalid, Loss, Metrics, Mode

GROUP = "rollout_corr"
"""The name of the group of presets and of the node."""

_NEAR = ("rolloutcorr", "rolloutcorrection", "verlrolloutcorr")
# Not the words that begin alike and mean something else: correct, correctness, correlation, corrupt, correspond.
_CONTAINS = re.compile(r"rolloutcorr(?!ect(?!ion)|el|up|esp)")
_WORDS = {
    "mode": Mode,
    "loss": Loss,
    "denominator": Denominator,
    "baseline": Baseline,
    "invalid": Invalid,
    "metrics": Metrics,
}
_SECTIONS = {"weights": ("level", "lower", "upper", "outside", "normalize"), "dump": ("dir", "every", "max_gb")}
_BOUNDS = ("lower", "upper", "when")
_WRITTEN_BY_PRESETS = "actor_rollout_ref.actor.policy_loss.rollout_corr"
_VERLS_OWN = frozenset({"algorithm.rollout_correction", "actor_rollout_ref.actor.policy_loss.rollout_correction"})
"""verl's own correction, which does not know our words or presets."""


@dataclass(frozen=True)
class Ours:
    """The names by which a key or a value is recognised as ours.

    `on` are the presets that the run uses, `presets` all others. A run with a preset on may keep criteria in a mapping
    of its own, so they are suspicious at the root only.
    """

    presets: Collection[str]
    criteria: Collection[str] = ()
    on: Sequence[str] = ()


@dataclass(frozen=True)
class Suspect:
    """A key that nothing reads and that was probably meant for us. `place` is where its value belongs in our node, and
    `near` says whether the key looks like ours, and not the value alone.
    """

    path: str
    value: object
    place: str = ""
    near: bool = False

    def problem(self, ours: Ours) -> Problem:
        """What to write instead."""
        presets = [*ours.on, *named_presets(self.value, ours.presets)]
        write = [] if ours.on and presets == [*ours.on] else [f"+{GROUP}={one_or_list(presets)}"]
        inside = isinstance(self.value, Mapping)
        if self.place or inside or not write:
            key = [GROUP, self.place, "<key>" if inside or not self.place else ""]
            write.append(f"++{'.'.join(filter(None, key))}=<value>")
        leave = "" if self.near or ours.on else f", or add +{GROUP}=null"
        return Problem(
            self.path,
            f"is {shown(self.value)}: nothing reads this key"
            + ("." if ours.on else f", and it chooses no preset of {GROUP}, so nothing would be corrected."),
            f"Did you mean {GROUP}? Write {' '.join(write)}"
            + ("" if ours.on else f" (in a YAML file: - {GROUP}: {one_or_list(presets)} in its defaults)")
            + f". If this key has nothing to do with rollout correction, give it another name{leave}.",
        )


def suspects(composed: Mapping[str, Any], ours: Ours, is_added: Callable[[str], bool]) -> list[Suspect]:
    """The keys of a composed configuration, without `hydra`, that were probably meant for us.

    Args:
        composed: plain nested mappings.
        ours: what a key or a value can be recognised by, beside its likeness to `rollout_corr`.
        is_added: whether a dotted key is the user's own and not verl's; asked only about keys that do not look like
            ours.
    """
    return list(_suspects(composed, "", ours, is_added))


def named_presets(value: object, presets: Collection[str]) -> list[str]:
    """The presets that a value names: `k3_rs`, `[token_is, k3_rs]` or `token_is,k3_rs`. A list that contains anything
    else counts only if one of the names has an underscore, as no ordinary word has.
    """
    listed = value.strip().strip("[]").split(",") if isinstance(value, str) else value
    if not isinstance(listed, list | tuple):
        return []
    names = [_as_written(name, presets) for name in cast("list[object]", listed) if isinstance(name, str)]
    found = [name for name in names if name in presets]
    return found if len(found) == len(cast("list[object]", listed)) or any("_" in name for name in found) else []


def one_or_list(presets: Sequence[str]) -> str:
    """Presets as an override names them, `<preset>` without any."""
    return "<preset>" if not presets else presets[0] if len(presets) == 1 else f"[{','.join(presets)}]"


def _as_written(name: str, presets: Collection[str]) -> str:
    """A preset's name for one in other letters, as K3_RS or k3-rs; a name of one word may be anyone's."""
    name = re.sub(r"^/?rollout_corr/|\.ya?ml$", "", name.strip())
    folded = name.lower().replace("-", "_")
    return folded if "_" in folded and folded in presets else name


def _suspects(node: Mapping[str, Any], path: str, ours: Ours, is_added: Callable[[str], bool]) -> Iterator[Suspect]:
    for key, value in node.items():
        here = f"{path}.{key}" if path else str(key)
        if here in (GROUP, _WRITTEN_BY_PRESETS):
            if path and named_presets(value, ours.presets):
                yield Suspect(here, value, near=True)
        elif here in _VERLS_OWN:
            yield from _in_verls_own(here, value, ours)
        elif any(_is_near(part, value, ours) for part in re.split(r"[./@ ]", str(key))):
            yield Suspect(here, value, near=True)
        elif key in ours.criteria and _has_bounds(value) and (path in ("", "reject") or not ours.on):
            yield Suspect(here, value, f"reject.{key}")
        elif not path and _is_of_our_node(str(key), value, ours) and is_added(here):  # the node's name was left out
            yield Suspect(here, value, str(key))
        elif key in ours.presets and (not path or "_" in str(key)) and is_added(here):  # `+k3_rs=true`
            yield Suspect(here, key)
        elif isinstance(value, Mapping):
            yield from _suspects(mapping(cast("object", value)), here, ours, is_added)
        elif named_presets(value, ours.presets) and is_added(here):
            yield Suspect(here, value)


def _in_verls_own(path: str, value: object, ours: Ours) -> Iterator[Suspect]:
    """Presets and keys of ours below verl's own correction, and a preset in its place."""
    own = mapping(value)
    mine = {key: item for key, item in own.items() if _is_of_our_node(key, item, ours)}
    if mine or named_presets(value, ours.presets):
        yield Suspect(path, mine or value, near=True)
    for key, item in own.items():
        if named_presets(item, ours.presets):
            yield Suspect(f"{path}.{key}", item, near=True)


def _is_near(name: str, value: object, ours: Ours) -> bool:
    letters = re.sub(r"[-_\s]", "", name.lower())
    if _CONTAINS.search(letters):
        return True
    differing = min(_differing(letters, near) for near in _NEAR)
    # A number is not a preset: `rollout_cores: 8` is somebody else's.
    if differing <= 2:
        return not isinstance(value, bool | int | float)
    looks_like_ours = value is None or bool(named_presets(value, ours.presets))
    inner = mapping(value).items()
    return differing <= 4 and (looks_like_ours or any(_is_of_our_node(key, item, ours) for key, item in inner))


def _differing(one: str, other: str) -> int:
    """Letters without a counterpart, of both words: 1 for a missing or an added letter, 2 for a wrong one."""
    return round((1 - SequenceMatcher(None, one, other).ratio()) * len(one + other))


def _is_of_our_node(key: str, value: object, ours: Ours) -> bool:
    """Whether our node has such a value below this key, and other programs are unlikely to."""
    if key in _WORDS:
        return isinstance(value, str) and value in list(_WORDS[key])
    inner = mapping(value)
    if key in _SECTIONS:
        return bool(inner) and all(name in _SECTIONS[key] for name in inner)
    if key == "reject":
        return any(name in ours.criteria and _has_bounds(item) for name, item in inner.items())
    return key == "min_group_kept" or (key in ours.criteria and _has_bounds(value))


def _has_bounds(value: object) -> bool:
    return any(name in mapping(value) for name in _BOUNDS)
