"""The rules about the rest of verl's configuration. A run that breaks one is refused when it is composed, before any
worker starts.

Standard library only: reads verl's configuration as nested mappings (a `DictConfig` is one), imports nothing of verl.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from verl_rollout_corr.configuration.node import ABSENT, instead, shown_or_absent, value_at
from verl_rollout_corr.configuration.own_correction import own_correction
from verl_rollout_corr.configuration.policy_losses import BYPASS_LOSS_MODE, policy_loss_objection
from verl_rollout_corr.configuration.sampling import log_prob_problems, sampling_warnings
from verl_rollout_corr.errors import ConfigError, Problem
from verl_rollout_corr.grammar import (
    Baseline,
    Invalid,
    Mode,
    Outside,
    RolloutCorrConfig,
    Scope,
    Stat,
)

POLICY_LOSS_TARGET = "verl_rollout_corr.hooks.policy_loss.RolloutCorrPolicyLossConfig"
"""The class that carries the configuration to the actor workers."""

TRAINER_MODES = ("sync", "colocate_async", "separate_async")
"""The V1 trainers that the hook knows."""

_LOSS = "actor_rollout_ref.actor.policy_loss"

GROUPED_ESTIMATORS = frozenset(
    {"grpo", "grpo_vectorized", "grpo_passk", "gpg", "rloo", "rloo_vectorized", "opo", "gdpo"}
    | {"reinforce_plus_plus_baseline", "optimal_token_baseline", "tir_optimal_token_baseline"}
)
"""verl's advantage estimators whose baseline is a statistic over the rows of a prompt. For the others `baseline: kept`
changes nothing.
"""


def check_run(config: RolloutCorrConfig, run: Mapping[str, Any]) -> None:
    """Refuse a run in which `config` would not be applied, or verl's own correction would be applied beside it.

    Args:
        config: a parsed configuration.
        run: verl's composed configuration, a `DictConfig` or nested mappings.

    Raises:
        ConfigError: with every problem: the key of verl's configuration, the value found and what to write.
    """
    found = run_problems(config, run)
    if found:
        raise ConfigError(*found)


def run_problems(config: RolloutCorrConfig, run: Mapping[str, Any]) -> list[Problem]:
    """The problems that `check_run` raises."""
    return [Problem.read(message) for rule in RULES for message in rule(config, run)]


def run_warnings(config: RolloutCorrConfig, run: Mapping[str, Any]) -> list[str]:
    """Warnings: the run does what was asked, but probably not what was meant."""
    return [message for rule in WARNINGS for message in rule(config, run)]


def _log_probs(config: RolloutCorrConfig, run: Mapping[str, Any]) -> Iterator[str]:
    key = "actor_rollout_ref.rollout.calculate_log_probs"
    found = value_at(run, key)
    if found is not True:
        yield (
            f"{key} is {shown_or_absent(found)}: without it the engine returns no log-probs, and there is nothing to "
            f"correct with. Write {key}=true, or leave it out: the presets set it."
        )


def _worker(config: RolloutCorrConfig, run: Mapping[str, Any]) -> Iterator[str]:
    key = f"{_LOSS}._target_"
    found = value_at(run, key)
    if value_at(run, _LOSS) is not ABSENT and found != POLICY_LOSS_TARGET:
        yield (
            f"{key} is {shown_or_absent(found)}: the actor workers would not know of rollout_corr. Leave it out (the "
            f"presets set it), or write {POLICY_LOSS_TARGET}."
        )


def _policy_loss(config: RolloutCorrConfig, run: Mapping[str, Any]) -> Iterator[str]:
    key = f"{_LOSS}.loss_mode"
    found = value_at(run, key)
    if found is ABSENT:
        return
    if config.mode is Mode.BYPASS:
        if found != BYPASS_LOSS_MODE:
            yield (
                f"{key} is {shown_or_absent(found)}: in bypass mode the loss is rollout_corr.loss ('{config.loss}'). "
                f"Leave {key} out, or write rollout_corr.mode: decoupled."
            )
        return
    if not isinstance(found, str) or not found.strip():
        yield (
            f"{key} is {shown_or_absent(found)}: verl looks its policy loss up by this name, in the first update, and "
            f"has none of that name. Leave {key} out (the presets set vanilla), or write the name of a policy loss."
        )
        return
    objection = policy_loss_objection(found, config)
    if objection:
        yield (f"{key} is {shown_or_absent(found)}: {objection}")


def _distillation(config: RolloutCorrConfig, run: Mapping[str, Any]) -> Iterator[str]:
    key = "distillation.enabled"
    found = value_at(run, key)
    if found not in (False, None, ABSENT):
        yield (
            f"{key} is {shown_or_absent(found)}: the distillation loss takes neither these weights nor this mask. "
            f"Write {key}=false, or leave +rollout_corr out."
        )


def _multi_token_prediction(config: RolloutCorrConfig, run: Mapping[str, Any]) -> Iterator[str]:
    key = "actor_rollout_ref.model.mtp"
    trains = all(value_at(run, f"{key}.{name}") is True for name in ("enable", "enable_train"))
    # verl's other engines train no such head
    megatron = value_at(run, "actor_rollout_ref.actor.strategy") == "megatron"
    if megatron and trains and value_at(run, f"{key}.detach_encoder") is not True:
        yield (
            f"{key}.enable_train is true: verl adds that loss outside the policy's, so rejected tokens would "
            f"train the policy through it. Write {key}.detach_encoder=true, {key}.enable_train=false, or leave "
            "+rollout_corr out."
        )


def _invalid(config: RolloutCorrConfig, run: Mapping[str, Any]) -> Iterator[str]:
    """A log-prob that is not a number must not reach what other rows are trained on."""
    if config.invalid is not Invalid.REJECT:
        return
    for key, readers, other in (
        ("algorithm.use_kl_in_reward", (True,), "false"),
        ("algorithm.adv_estimator", ("optimal_token_baseline", "tir_optimal_token_baseline"), "grpo"),
    ):
        found = value_at(run, key)
        if found in readers:
            yield (
                f"{key} is {shown_or_absent(found)}, and rollout_corr.invalid is 'reject': log-probs would be read "
                "there before anything is rejected, so a log-prob that is not a number would reach the "
                f"advantages of its whole group. Write rollout_corr.invalid=error, or {key}={other}."
            )


def _trainer(config: RolloutCorrConfig, run: Mapping[str, Any]) -> Iterator[str]:
    key = "trainer.v1.trainer_mode"
    found = value_at(run, key)
    if value_at(run, "trainer.use_v1") is True and found not in TRAINER_MODES:
        yield (
            f"{key} is {shown_or_absent(found)}: whether that trainer applies the correction is not known. "
            f"{instead(str(found), TRAINER_MODES, {})}"
        )


def _groups(config: RolloutCorrConfig, run: Mapping[str, Any]) -> Iterator[str]:
    """Groups smaller than the configuration needs: every row would be rejected, or every advantage would be 0."""
    key, estimator = "actor_rollout_ref.rollout.n", value_at(run, "algorithm.adv_estimator")
    rows = value_at(run, key)
    if not isinstance(rows, int) or isinstance(rows, bool):
        return
    if config.min_group_kept is not None and config.min_group_kept > rows:
        yield (
            f"rollout_corr.min_group_kept is {config.min_group_kept}, and {key} is {rows}: no group has that many "
            f"responses, so every response would be rejected. Write rollout_corr.min_group_kept={rows} or less, "
            f"or {key}={config.min_group_kept} or more."
        )
    if config.baseline is Baseline.KEPT and rows == 1 and estimator in GROUPED_ESTIMATORS:
        yield (
            f"rollout_corr.baseline is 'kept', and {key} is 1: a group with one kept response has advantage 0, so "
            f"nothing would be trained with {estimator}. Write {key}=2 or more, or rollout_corr.baseline=all."
        )


def _bounds_without_one(config: RolloutCorrConfig, run: Mapping[str, Any]) -> Iterator[str]:
    """Bounds on a ratio that exclude 1: tokens on which the two policies agree would be rejected, or weigh 0."""
    # A batch mean has an upper bound only, and keeps the smallest whatever it is.
    bounded = {
        f"rollout_corr.reject.{criterion.name}": (criterion.bounds, "be rejected")
        for criterion in config.reject
        if criterion.stat is Stat.K1 and criterion.scope is not Scope.BATCH and criterion.when is None
    }
    if config.weights is not None and config.weights.outside is Outside.MASK:
        bounded["rollout_corr.weights"] = (config.weights.bounds, "weigh 0 (outside: mask)")
    for key, (bounds, fate) in bounded.items():
        lower, upper = bounds.lower or 0.0, math.inf if bounds.upper is None else bounds.upper
        if not lower <= 1 <= upper:
            yield (
                f"{key} is [{lower:g}, {upper:g}]: where the two policies agree the ratio is 1, and would {fate}. "
                "Write lower <= 1 <= upper."
            )


def _does_nothing(config: RolloutCorrConfig, run: Mapping[str, Any]) -> Iterator[str]:
    """Overrides that removed everything that a preset does."""
    bypass = config.mode is Mode.BYPASS
    idle = "bypass_ppo_clip" if bypass else "metrics_only"
    does = config.weights is not None or config.reject or config.min_group_kept is not None
    if does or not config.presets or idle in config.presets or config.invalid is not Invalid.ERROR:
        return
    yield (
        f"{'+'.join(config.presets)} does nothing: no weights and no criterion are left of it, so "
        f"{'bypass mode neither weighs nor rejects' if bypass else 'the run is measured and not corrected'}. Write "
        f"+rollout_corr={idle} if that is what you want."
    )


Rule = Callable[[RolloutCorrConfig, Mapping[str, Any]], Iterator[str]]
"""Yields a message for everything that one rule objects to: `<key> is <value>: <why>. Write <remedy>`."""

RULES: tuple[Rule, ...] = (
    _log_probs,
    log_prob_problems,
    own_correction,
    _worker,
    _policy_loss,
    _distillation,
    _multi_token_prediction,
    _invalid,
    _trainer,
    _groups,
    _bounds_without_one,
)
"""The rules whose problems stop a run."""

WARNINGS: tuple[Rule, ...] = (sampling_warnings, _does_nothing)
"""The rules whose messages are warnings."""
