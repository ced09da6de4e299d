"""verl's own correction beside ours: refused, with the overrides that say the same here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from verl_rollout_corr.configuration import hints
from verl_rollout_corr.configuration.node import ABSENT, mapping, shown_or_absent, value_at
from verl_rollout_corr.configuration.translation import translate
from verl_rollout_corr.errors import ConfigError
from verl_rollout_corr.grammar import Mode, RolloutCorrConfig

_OWN = "algorithm.rollout_correction"
_NOT_SETTINGS = ("bypass_mode", "rollout_corr", "_target_")
# verl 0.9.1's defaults. Any other value was written by hand.
_OWN_DEFAULTS: dict[str, Any] = {
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_is_batch_normalize": False,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
    "loss_type": "ppo_clip",
}


def own_correction(config: RolloutCorrConfig, run: Mapping[str, Any]) -> Iterator[str]:
    """A message for every key of verl's own correction that was set by hand."""
    bypass = value_at(run, f"{_OWN}.bypass_mode")
    if bypass is not ABSENT and bypass is not (config.mode is Mode.BYPASS):
        yield (
            f"{_OWN}.bypass_mode is {shown_or_absent(bypass)}, and rollout_corr.mode is '{config.mode}'. "
            f"Leave {_OWN}.bypass_mode out, it follows rollout_corr.mode, and write rollout_corr.mode: "
            f"{'decoupled' if config.mode is Mode.BYPASS else 'bypass'} if that is what you want."
        )
    node = mapping(value_at(run, _OWN))
    own = {name: value_at(node, name) for name in node if name not in _NOT_SETTINGS}  # items() would resolve all of it
    for name, found in own.items():
        default = _OWN_DEFAULTS.get(name)
        if found != default:
            yield (
                f"{_OWN}.{name} is {shown_or_absent(found)}: verl's own correction cannot run beside rollout_corr. "
                f"Leave it out (its default is {shown_or_absent(default)}) and write {_ours(name, own)}, or leave "
                "+rollout_corr out."
            )


def _ours(name: str, own: Mapping[str, Any]) -> str:
    """The overrides that say the same here, or the nearest key of ours. Weights and criteria are translated apart, so
    that a wrong value of one does not hide the other.
    """
    if name == "loss_type":
        return f"rollout_corr.mode=bypass rollout_corr.loss={own[name]}"
    family = name[: len("rollout_is")]
    settings = {key: str(value) for key, value in own.items() if key.startswith(family) and value is not None}
    if family == "rollout_is":
        settings.setdefault("rollout_is", "token")
    try:
        overrides = translate("verl", settings, {}).overrides
    except ConfigError:
        overrides = ()
    lines = [line for line in overrides[1:] if not line.endswith("=null")]
    if own.get("rollout_is") is None:  # bounds without a level
        lines = [line for line in lines if not line.startswith("rollout_corr.weights.level")]
    return " ".join(lines) or hints.KEYS.get(name, "a key of rollout_corr")
