"""verl's own correction beside ours: refused, key by key, with the overrides that say the same here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from verl_rollout_corr.configuration import hints
from verl_rollout_corr.configuration.node import ABSENT, shown_or_absent, two_bounds, value_at
from verl_rollout_corr.grammar import Mode, RolloutCorrConfig

_LOSS = "actor_rollout_ref.actor.policy_loss"
_OWN = "algorithm.rollout_correction"
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
    own: object = value_at(run, _OWN)
    for name in cast("Mapping[str, Any]", own) if isinstance(own, Mapping) else ():
        if name in ("bypass_mode", "rollout_corr", "_target_"):
            continue
        found, default = value_at(cast("object", own), name), _OWN_DEFAULTS.get(name)
        if found != default:
            yield (
                f"{_OWN}.{name} is {shown_or_absent(found)}: verl's own correction cannot run beside rollout_corr. "
                f"Leave it out (its default is {shown_or_absent(default)}) and write {_ours(name, own)}, or leave "
                "+rollout_corr out."
            )
    nested = value_at(run, f"{_LOSS}.rollout_correction")
    if nested is not ABSENT and nested is not None:
        yield (
            f"{_LOSS}.rollout_correction is {shown_or_absent(nested)}: verl's own correction cannot run beside "
            "rollout_corr. Leave it out and write rollout_corr, or leave +rollout_corr out."
        )


def _ours(name: str, own: Any) -> str:
    """The overrides that say the same here as this key of verl's own correction."""
    found = value_at(own, name)
    if name == "rollout_is":
        level = hints.LEVELS.get(str(found), str(found))
        return f"rollout_corr.weights.level={level}"
    if name == "rollout_is_threshold":
        pair = two_bounds(str(found))
        if pair is None:
            return f"rollout_corr.weights.upper={found}"
        bounds = f"rollout_corr.weights.lower={pair[0]} rollout_corr.weights.upper={pair[1]}"
        return f"{bounds} rollout_corr.weights.outside=mask"
    if name == "rollout_is_batch_normalize":
        return "rollout_corr.weights.normalize=batch"
    if name in ("rollout_rs", "rollout_rs_threshold"):
        return " ".join(_our_criteria(value_at(own, "rollout_rs"), value_at(own, "rollout_rs_threshold")))
    if name == "loss_type":
        return f"rollout_corr.mode=bypass rollout_corr.loss={found}"
    return hints.KEYS.get(name, "a key of rollout_corr")


def _our_criteria(names: object, thresholds: object) -> Iterator[str]:
    """Verl's k1 is -log r, so that its bounds are those of 1/r: they change places, and one alone has its inverse."""
    bounds = [text.strip() for text in str(thresholds).split(",")] if thresholds not in (None, ABSENT) else []
    words = [hints.CRITERIA.get(word, word) for word in str(names).split(",")] if isinstance(names, str) else []
    for i, name in enumerate(words or ["<criterion>"]):
        text = bounds[i] if i < len(bounds) else bounds[0] if len(bounds) == 1 else "<bound>"
        lower, upper = two_bounds(text) or (_inverse(text), text)
        if name.endswith("_k1"):
            yield f"+rollout_corr.reject.{name}={{lower: {_inverse(upper)}, upper: {_inverse(lower)}}}"
        else:
            yield f"+rollout_corr.reject.{name}.upper={upper}"


def _inverse(text: str) -> str:
    try:
        return f"{1 / float(text):.6g}"
    except (ValueError, ZeroDivisionError):
        return f"1/{text}"
