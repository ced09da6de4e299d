"""Settings of verl's older corrections and of other frameworks, added at places where nothing reads them.

Hydra takes any `+key=value`, so that `+algorithm.use_tis=true` would train uncorrected. The words are those of `hints`,
and what to write comes from `translation`. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from verl_rollout_corr.configuration.hints import HINTS, Hint, Kind
from verl_rollout_corr.configuration.node import mapping, shown
from verl_rollout_corr.configuration.translation import PEERS, translate
from verl_rollout_corr.errors import ConfigError, Problem

_ANYBODYS = frozenset({"loss_type", "loss_mode", "weight_type", "rejection_sampling", "use_policy_gradient"})
"""Words of the table that a key of the user's may be called by."""

_HINTS: Mapping[str, Hint] = {
    hint.theirs: hint
    for hint in HINTS
    if hint.kind is Kind.KEY
    and (hint.peer != "anyone" or hint.theirs == "max_staleness")
    and hint.theirs not in _ANYBODYS
}
_NOT_OURS = ("hydra.", "rollout_corr.", "ray_kwargs.", "actor_rollout_ref.actor.policy_loss.rollout_corr")
"""Hydra's node, ours, environments of Ray's workers, and what presets write."""
_REPORTED_WITH_A_PRESET = ("algorithm.rollout_correction.",)
"""verl's own correction, which `own_correction` refuses beside a preset."""
_WHOSE = {"verl": "a word of older versions", "anyone": "other frameworks have it"}
_OFF = ("", "none", "null", "false", "no", "off", "0", "disable", "disabled")


def peers_keys(
    composed: Mapping[str, Any],
    is_added: Callable[[str], bool],
    presets: Callable[[], Mapping[str, Mapping[str, Any]]],
    *,
    preset_on: bool,
) -> Iterator[Problem]:
    """A problem for every key that a run adds, that nothing in verl reads, and that asks for a correction by the name
    it has in verl's past or in another framework.

    Args:
        composed: plain nested mappings.
        is_added: whether a dotted key is the user's own and not verl's.
        presets: gives every preset as a mapping, by name.
        preset_on: whether a preset corrects the run; then the key of ours is named, and otherwise a command line.
    """
    skipped = {*_NOT_OURS, *(_REPORTED_WITH_A_PRESET if preset_on else ())}
    leaves = [(path, value) for path, value in _leaves(composed, "") if not path.startswith(tuple(skipped))]
    found = [(path, value) for path, value in leaves if _hint(path) is not None and is_added(path)]
    asking = [(path, value) for path, value in found if str(value).strip().lower() not in _OFF]
    line = None if preset_on or not asking else _line({path: str(value) for path, value in found}, presets())
    for number, (path, value) in enumerate(asking):
        hint = cast("Hint", _hint(path))
        whose = _WHOSE.get(hint.peer, f"a word of {hint.peer}")
        nearest = f"the nearest here is {hint.ours}" + (f" ({hint.differs})" if hint.differs else "")
        write = f" Write {line or '+rollout_corr=<preset>'}, or +rollout_corr=null to go without."
        yield Problem(
            path,
            f"is {shown(value)}: nothing in this verl reads this key ({whose}), so that it would correct nothing.",
            f"Leave it out: {nearest}." + (write if number == 0 and not preset_on else ""),
        )


def _leaves(node: Mapping[str, Any], path: str) -> Iterator[tuple[str, object]]:
    for key, value in node.items():
        here = f"{path}.{key}" if path else str(key)
        inner = mapping(value)
        yield from _leaves(inner, here) if inner else [(here, value)]


def _hint(path: str) -> Hint | None:
    return _HINTS.get(path.rpartition(".")[2].lower().replace("-", "_"))


def _line(settings: Mapping[str, str], presets: Mapping[str, Mapping[str, Any]]) -> str | None:
    """What one framework means by these settings, as our overrides; None where no framework knows all of them."""
    for peer in PEERS:
        try:
            found = translate(peer, settings, presets)
        except ConfigError:
            continue
        if not found.unsaid and found.overrides != ("+rollout_corr=metrics_only",):
            return " ".join(line for line in found.overrides if not line.endswith("=null"))
    return None
