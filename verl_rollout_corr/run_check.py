"""What a configuration needs from the rest of verl's: refused when the run is composed, before any worker starts.

Standard library only: reads verl's configuration as nested mappings (a `DictConfig` is one) and imports nothing of verl.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from verl_rollout_corr.errors import ConfigError
from verl_rollout_corr.grammar import Criterion, Denominator, Mode, RolloutCorrConfig, Scope

BYPASS_LOSS_MODE = "rollout_corr"
"""The name under which the hook registers its policy loss with verl."""

POLICY_LOSS_TARGET = "verl_rollout_corr.hooks.policy_loss.RolloutCorrPolicyLossConfig"
"""The class that carries the configuration to the actor workers."""

_ABSENT = object()
_ACTOR = "actor_rollout_ref.actor"
_OWN = "algorithm.rollout_correction"
# verl 0.9.1's defaults, and what says the same here. Anything else under the node was written by hand.
_OWN_DEFAULTS: dict[str, tuple[Any, str]] = {
    "rollout_is": (None, "weights.level"),
    "rollout_is_threshold": (2.0, "weights.lower and weights.upper"),
    "rollout_rs": (None, "reject"),
    "rollout_rs_threshold": (None, "reject"),
    "loss_type": ("ppo_clip", "loss"),
    "rollout_is_batch_normalize": (False, "weights.normalize"),
}
_TRAINER_MODES = ("sync", "colocate_async", "separate_async")


def check_run(config: RolloutCorrConfig, run: Mapping[str, Any]) -> None:
    """Refuse a run in which `config` would not be applied, or verl's own correction would be applied beside it.

    Args:
        config: a parsed configuration.
        run: verl's composed configuration, a `DictConfig` or nested mappings.

    Raises:
        ConfigError: naming the key of verl's configuration, the value found and what to write.
    """
    _check_log_probs(run)
    _check_own_correction(config, run)
    _check_worker_hook(run)
    _check_policy_loss(config, run)
    _check_trainer(run)


def policy_loss_objection(loss_mode: str, config: RolloutCorrConfig) -> str | None:
    """Why this policy loss of verl would be wrong with `config` in decoupled mode, or None when it is right."""
    rule = _POLICY_LOSSES.get(loss_mode)
    return rule(config) if rule else None


def _check_log_probs(run: Mapping[str, Any]) -> None:
    key = "actor_rollout_ref.rollout.calculate_log_probs"
    found = _at(run, key)
    if found is not True:
        raise ConfigError(
            f"{key} is {_shown(found)}: without it the rollout engine returns no log-probs and there is nothing to correct with. "
            f"Write {key}=true, or leave it out: the presets set it."
        )


def _check_own_correction(config: RolloutCorrConfig, run: Mapping[str, Any]) -> None:
    bypass = _at(run, f"{_OWN}.bypass_mode")
    if bypass is not _ABSENT and bypass is not (config.mode is Mode.BYPASS):
        raise ConfigError(
            f"{_OWN}.bypass_mode is {_shown(bypass)} and rollout_corr.mode is '{config.mode}': the two must say the same. "
            f"Leave {_OWN}.bypass_mode out and write rollout_corr.mode: the presets derive the one from the other."
        )
    own = _at(run, _OWN)
    for name, found in own.items() if isinstance(own, Mapping) else ():
        default, ours = _OWN_DEFAULTS.get(name, (None, None))
        if name not in ("bypass_mode", "_target_", "rollout_corr") and found != default:
            instead = f"and write rollout_corr.{ours}" if ours else "and write what you need under rollout_corr"
            raise ConfigError(
                f"{_OWN}.{name} is {_shown(found)}: verl's own correction cannot run beside rollout_corr. "
                f"Leave it out {instead} (default: {_shown(default)}), or leave +rollout_corr out."
            )
    nested = _at(run, f"{_ACTOR}.policy_loss.rollout_correction")
    if nested is not _ABSENT and nested is not None:
        raise ConfigError(
            f"{_ACTOR}.policy_loss.rollout_correction is set: verl's own correction cannot run beside rollout_corr. "
            f"Leave it out and write what you need under rollout_corr, or leave +rollout_corr out."
        )


def _check_worker_hook(run: Mapping[str, Any]) -> None:
    key = f"{_ACTOR}.policy_loss._target_"
    found = _at(run, key)
    if _at(run, f"{_ACTOR}.policy_loss") is not _ABSENT and found != POLICY_LOSS_TARGET:
        raise ConfigError(
            f"{key} is {_shown(found)}: the actor workers would not know of rollout_corr. "
            f"Leave it out (the presets set it), or write {POLICY_LOSS_TARGET}."
        )


def _check_policy_loss(config: RolloutCorrConfig, run: Mapping[str, Any]) -> None:
    if _at(run, "distillation.enabled") not in (False, None, _ABSENT):
        raise ConfigError(
            f"distillation.enabled is {_shown(_at(run, 'distillation.enabled'))}: the distillation loss takes neither our weights nor our mask. "
            f"Write distillation.enabled=false, or leave +rollout_corr out."
        )
    key = f"{_ACTOR}.policy_loss.loss_mode"
    found = _at(run, key)
    if found is _ABSENT:
        return
    if config.mode is Mode.BYPASS:
        if found != BYPASS_LOSS_MODE:
            raise ConfigError(
                f"{key} is {_shown(found)}: in bypass mode the loss is rollout_corr.loss ('{config.loss}'). "
                f"Leave {key} out, or write rollout_corr.mode: decoupled."
            )
        return
    objection = policy_loss_objection(str(found), config)
    if objection:
        raise ConfigError(f"{key} is {_shown(found)}: {objection}")


def _check_trainer(run: Mapping[str, Any]) -> None:
    if _at(run, "trainer.use_v1") is not True:
        return
    key = "trainer.v1.trainer_mode"
    found = _at(run, key)
    if found not in _TRAINER_MODES:
        near = get_close_matches(str(found), _TRAINER_MODES, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"{key} is {_shown(found)}: it is not known whether that trainer would apply the correction. "
            f"{hint}Write {', '.join(_TRAINER_MODES[:-1])} or {_TRAINER_MODES[-1]}, or trainer.use_v1=false."
        )


def _rejects_parts_of_sequences(config: RolloutCorrConfig) -> Criterion | None:
    return next((c for c in config.reject if c.scope is not Scope.SEQ), None)


def _gspo(config: RolloutCorrConfig) -> str | None:
    criterion = _rejects_parts_of_sequences(config)
    if criterion is None or config.denominator is Denominator.KEPT:
        return None
    return (
        f"its sequence ratio is a mean over the response mask, which rejected tokens would dilute, and rollout_corr.reject.{criterion.name} rejects "
        f"parts of a sequence. Write a criterion of whole sequences (seq_<agg>_<stat>), or another loss_mode."
    )


def _own_bypass(config: RolloutCorrConfig) -> str | None:
    return "it is verl's own correction in bypass mode. Leave it out and write rollout_corr.mode: bypass."


def _ours_in_decoupled(config: RolloutCorrConfig) -> str | None:
    return "it is the loss of bypass mode, and rollout_corr.mode is 'decoupled'. Leave it out, or write rollout_corr.mode: bypass."


# verl's policy losses that need more than a mask and weights. One that is not here takes both as they are.
_POLICY_LOSSES: dict[str, Callable[[RolloutCorrConfig], str | None]] = {
    "gspo": _gspo,
    "bypass_mode": _own_bypass,
    BYPASS_LOSS_MODE: _ours_in_decoupled,
}


def _at(run: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, or `_ABSENT`."""
    value: Any = run
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return _ABSENT
        value = value[key]
    return value


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "not set"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)
