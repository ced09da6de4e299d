"""What a configuration needs from the rest of verl's: refused when the run is composed, before any worker starts.

Standard library only: reads verl's configuration as nested mappings (a `DictConfig` is one), imports nothing of verl.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from verl_rollout_corr.configuration.node import ABSENT, instead, shown, value_at
from verl_rollout_corr.errors import ConfigError
from verl_rollout_corr.grammar import Denominator, Invalid, Mode, Outside, RolloutCorrConfig, Scope

BYPASS_LOSS_MODE = "rollout_corr"
"""The name under which the hook registers its policy loss with verl."""

POLICY_LOSS_TARGET = "verl_rollout_corr.hooks.policy_loss.RolloutCorrPolicyLossConfig"
"""The class that carries the configuration to the actor workers."""

TRAINER_MODES = ("sync", "colocate_async", "separate_async")
"""The V1 trainers that the hook knows."""

_LOSS = "actor_rollout_ref.actor.policy_loss"
_OWN = "algorithm.rollout_correction"
# verl 0.9.1's defaults, and what says the same here. Any other value was written by hand.
_OWN_DEFAULTS: dict[str, tuple[Any, str]] = {
    "rollout_is": (None, "rollout_corr.weights.level"),
    "rollout_is_threshold": (2.0, "rollout_corr.weights.lower and upper"),
    "rollout_is_batch_normalize": (False, "rollout_corr.weights.normalize"),
    "rollout_rs": (None, "rollout_corr.reject"),
    "rollout_rs_threshold": (None, "rollout_corr.reject"),
    "loss_type": ("ppo_clip", "rollout_corr.loss"),
}


def check_run(config: RolloutCorrConfig, run: Mapping[str, Any]) -> None:
    """Refuse a run in which `config` would not be applied, or verl's own correction would be applied beside it.

    Args:
        config: a parsed configuration.
        run: verl's composed configuration, a `DictConfig` or nested mappings.

    Raises:
        ConfigError: naming the key of verl's configuration, the value found and what to write.
    """
    _check_log_probs(run)
    _check_sampling_log_probs(run)
    _check_own_correction(config, run)
    _check_worker(run)
    _check_policy_loss(config, run)
    _check_distillation(run)
    _check_multi_token_prediction(run)
    _check_invalid(config, run)
    _check_trainer(run)


def policy_loss_objection(loss_mode: str, config: RolloutCorrConfig) -> str | None:
    """Why this policy loss of verl would be wrong with `config` in decoupled mode, or None where it is right."""
    rule = _POLICY_LOSSES.get(loss_mode)
    return rule(config) if rule else None


def _check_log_probs(run: Mapping[str, Any]) -> None:
    key = "actor_rollout_ref.rollout.calculate_log_probs"
    found = value_at(run, key)
    if found is not True:
        raise ConfigError(
            f"{key} is {_shown(found)}: unless it is true the rollout engine returns no log-probs, and there would be "
            f"nothing to correct with. Write {key}=true, or leave it out: the presets set it."
        )


def _check_sampling_log_probs(run: Mapping[str, Any]) -> None:
    """Mu is the distribution that was sampled from."""
    rollout = "actor_rollout_ref.rollout"
    # Arguments of the engine's own go over verl's, and vLLM takes an absent mode for raw_logprobs.
    key = f"{rollout}.logprobs_mode"
    vllm = value_at(run, f"{rollout}.name") == "vllm"
    if vllm and value_at(run, f"{rollout}.engine_kwargs.vllm.logprobs_mode") not in (ABSENT, None):
        key = f"{rollout}.engine_kwargs.vllm.logprobs_mode"
    found = value_at(run, key)
    mode = "raw_logprobs" if found is None and vllm else found
    temperature = value_at(run, f"{rollout}.temperature")
    if isinstance(mode, str) and mode.endswith("_logits"):
        raise ConfigError(
            f"{key} is {_shown(found)}: logits are no log-probs. "
            f"Write {rollout}.logprobs_mode=processed_logprobs, or leave {key} out."
        )
    if mode == "raw_logprobs" and temperature not in (ABSENT, 1, 1.0):
        raise ConfigError(
            f"{key} is {_shown(found)} and {rollout}.temperature {_shown(temperature)}: the engine would report "
            "log-probs before the temperature, which the trainer applies. "
            f"Write {rollout}.logprobs_mode=processed_logprobs, or leave {key} out."
        )


def _check_own_correction(config: RolloutCorrConfig, run: Mapping[str, Any]) -> None:
    bypass = value_at(run, f"{_OWN}.bypass_mode")
    if bypass is not ABSENT and bypass is not (config.mode is Mode.BYPASS):
        raise ConfigError(
            f"{_OWN}.bypass_mode is {_shown(bypass)}, and rollout_corr.mode is '{config.mode}'. "
            f"Leave {_OWN}.bypass_mode out, it follows rollout_corr.mode, and write rollout_corr.mode: "
            f"{'decoupled' if config.mode is Mode.BYPASS else 'bypass'} if that is what you want."
        )
    own = value_at(run, _OWN)
    for name, found in cast("Mapping[str, Any]", own).items() if isinstance(own, Mapping) else ():
        default, ours = _OWN_DEFAULTS.get(name, (None, "a key of rollout_corr"))
        if name not in ("bypass_mode", "rollout_corr", "_target_") and found != default:
            raise ConfigError(
                f"{_OWN}.{name} is {_shown(found)}: verl's own correction cannot run beside rollout_corr. Leave it out "
                f"(its default is {_shown(default)}) and write {ours}, or leave +rollout_corr out."
            )
    nested = value_at(run, f"{_LOSS}.rollout_correction")
    if nested is not ABSENT and nested is not None:
        raise ConfigError(
            f"{_LOSS}.rollout_correction is {_shown(nested)}: verl's own correction cannot run beside rollout_corr. "
            f"Leave it out and write rollout_corr, or leave +rollout_corr out."
        )


def _check_worker(run: Mapping[str, Any]) -> None:
    key = f"{_LOSS}._target_"
    found = value_at(run, key)
    if value_at(run, _LOSS) is not ABSENT and found != POLICY_LOSS_TARGET:
        raise ConfigError(
            f"{key} is {_shown(found)}: the actor workers would not know of rollout_corr. "
            f"Leave it out (the presets set it), or write {POLICY_LOSS_TARGET}."
        )


def _check_policy_loss(config: RolloutCorrConfig, run: Mapping[str, Any]) -> None:
    key = f"{_LOSS}.loss_mode"
    found = value_at(run, key)
    if found is ABSENT:
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


def _check_distillation(run: Mapping[str, Any]) -> None:
    key = "distillation.enabled"
    found = value_at(run, key)
    if found not in (False, None, ABSENT):
        raise ConfigError(
            f"{key} is {_shown(found)}: the distillation loss takes neither these weights nor this mask. "
            f"Write {key}=false, or leave +rollout_corr out."
        )


def _check_multi_token_prediction(run: Mapping[str, Any]) -> None:
    key = "actor_rollout_ref.model.mtp"
    enabled, trains, detached = (
        value_at(run, f"{key}.{name}") for name in ("enable", "enable_train", "detach_encoder")
    )
    megatron = (
        value_at(run, "actor_rollout_ref.actor.strategy") == "megatron"
    )  # verl's other engines train no such head
    if megatron and enabled is True and trains is True and detached is not True:
        raise ConfigError(
            f"{key}.enable_train is true: verl adds that loss outside the policy's, so that rejected tokens would "
            f"train the policy through it. Write {key}.detach_encoder=true, {key}.enable_train=false, or leave "
            "+rollout_corr out."
        )


def _check_invalid(config: RolloutCorrConfig, run: Mapping[str, Any]) -> None:
    """A log-prob that is no number must not reach what other rows are trained on."""
    if config.invalid is not Invalid.REJECT:
        return
    for key, readers, other in (
        ("algorithm.use_kl_in_reward", (True,), "false"),
        ("algorithm.adv_estimator", ("optimal_token_baseline", "tir_optimal_token_baseline"), "grpo"),
    ):
        found = value_at(run, key)
        if found in readers:
            raise ConfigError(
                f"{key} is {_shown(found)}, and rollout_corr.invalid is 'reject': log-probs would be read there before "
                "anything is rejected, so that one that is no number would reach the advantages of its whole group. "
                f"Write rollout_corr.invalid=error, or {key}={other}."
            )


def _check_trainer(run: Mapping[str, Any]) -> None:
    key = "trainer.v1.trainer_mode"
    found = value_at(run, key)
    if value_at(run, "trainer.use_v1") is True and found not in TRAINER_MODES:
        raise ConfigError(
            f"{key} is {_shown(found)}: whether that trainer applies the correction is not known. "
            f"{instead(str(found), TRAINER_MODES, {})}"
        )


def _part_of_a_sequence(config: RolloutCorrConfig) -> str | None:
    """The first criterion that can reject some tokens of a sequence and keep others."""
    return next((criterion.name for criterion in config.reject if criterion.scope is not Scope.SEQ), None)


def _gspo(config: RolloutCorrConfig) -> str | None:
    part = _part_of_a_sequence(config)
    if part is None or config.denominator is Denominator.KEPT:
        return None
    return (
        f"its sequence ratio is a mean over the response mask, which the tokens rejected by "
        f"rollout_corr.reject.{part} would dilute. Write criteria of whole sequences (seq_<agg>_<stat>), "
        f"rollout_corr.denominator: kept, or another loss_mode."
    )


def _geo_mean(config: RolloutCorrConfig) -> str | None:
    part = _part_of_a_sequence(config)
    if part is not None:
        return (
            f"its geometric mean of ratios and weights runs over the response mask, which the tokens rejected by "
            f"rollout_corr.reject.{part} would dilute. Write criteria of whole sequences (seq_<agg>_<stat>), "
            f"or another loss_mode."
        )
    if config.denominator is Denominator.KEPT:
        return (
            "it divides by the rows of each micro-batch, kept or not, and takes no other denominator. "
            "Write rollout_corr.denominator: all, or another loss_mode."
        )
    if config.weights is not None and config.weights.outside is Outside.MASK:
        return (
            "it takes the geometric mean of a row's weights, with 1e-10 for a weight of 0: one token outside the "
            "bounds would scale the whole row by an arbitrary number. Write rollout_corr.weights.outside: truncate, "
            "or another loss_mode."
        )
    return None


def _covariance(config: RolloutCorrConfig) -> str | None:
    rejects = config.reject or config.min_group_kept is not None or config.invalid is Invalid.REJECT
    if not rejects or config.denominator is Denominator.KEPT:
        return None
    return (
        "it selects tokens by their distance from means over the response mask, in which rejected tokens would count "
        "and among which they would be selected. Write rollout_corr.denominator: kept, or another loss_mode."
    )


def _own_bypass(config: RolloutCorrConfig) -> str | None:
    return "it is verl's own correction. Leave it out and write rollout_corr.mode: bypass."


def _loss_of_bypass(config: RolloutCorrConfig) -> str | None:
    return "it is the loss of bypass mode. Leave it out, or write rollout_corr.mode: bypass."


# verl's policy losses that do not take any mask and any weights (docs/policy-losses.md). One that is not listed takes
# both as they are.
_POLICY_LOSSES: dict[str, Callable[[RolloutCorrConfig], str | None]] = {
    "gspo": _gspo,
    "geo_mean": _geo_mean,
    "clip_cov": _covariance,
    "kl_cov": _covariance,
    "bypass_mode": _own_bypass,
    BYPASS_LOSS_MODE: _loss_of_bypass,
}


def _shown(value: object) -> str:
    return "not set" if value is ABSENT else shown(value)
