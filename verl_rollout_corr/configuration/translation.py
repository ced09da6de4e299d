"""From the settings of verl's own correction or of another framework to a command line of ours.

`hints.py` says what one setting means there. Here several settings together become one configuration. A meaning that
our configuration cannot express is named, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_rollout_corr.configuration.draft import Draft, Settings, as_text
from verl_rollout_corr.configuration.frameworks import PEERS
from verl_rollout_corr.configuration.hints import HINTS
from verl_rollout_corr.configuration.node import listed
from verl_rollout_corr.configuration.parser import parse, to_mapping
from verl_rollout_corr.errors import ConfigError


@dataclass(frozen=True)
class Translation:
    """Overrides to write on verl's command line, what differs in meaning, and what cannot be said."""

    overrides: tuple[str, ...]
    differs: tuple[str, ...]
    unsaid: tuple[str, ...]


def translate(peer: str, settings: Mapping[str, str], presets: Mapping[str, Mapping[str, Any]]) -> Translation:
    """The command line of ours that says the same.

    Args:
        peer: a name of `PEERS`.
        settings: as the framework's user writes them, by their last name (`rollout_is`, `tis_clip`).
        presets: every preset of ours as a mapping, by name: where one says all, it alone is written.

    Raises:
        ConfigError: for a peer that is not known, or values that contradict our rules.
    """
    rule = PEERS.get(peer.lower().replace("_", "-"))
    if rule is None:
        raise ConfigError(
            f"--from is {peer!r}: it is not a framework that is known here. Write {listed(sorted(PEERS))}."
        )
    unread, draft = Settings(settings), Draft()
    rule(unread, draft)
    for name in unread.left:
        hint = next((hint for hint in HINTS if hint.theirs == name), None)
        draft.unsaid.append(f"{name}: {f'the nearest here is {hint.ours}' if hint else 'not known here'}")
    node = to_mapping(parse(draft.node()))
    return Translation(_overrides(node, presets), tuple(dict.fromkeys(draft.differs)), tuple(draft.unsaid))


def _overrides(node: dict[str, Any], presets: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    for name, other in presets.items():
        if all(node[key] == other[key] for key in ("mode", "loss", "weights", "reject")):
            return (f"+rollout_corr={name}",)
    base = "metrics_only" if node["mode"] == "decoupled" else f"bypass_{node['loss']}"
    written = [f"+rollout_corr={base}"]
    if node["weights"]["level"] is not None:
        written += [f"rollout_corr.weights.{key}={as_text(value)}" for key, value in node["weights"].items()]
    elif base == "bypass_reinforce":
        written.append("rollout_corr.weights.level=null")
    for name, bounds in node["reject"].items():
        written += [
            f"+rollout_corr.reject.{name}.{key}={as_text(value)}" for key, value in bounds.items() if value is not None
        ]
    return tuple(written)
