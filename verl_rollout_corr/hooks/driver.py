"""What both trainers do around the actor's update: correct the whole batch, and turn what the workers send into
metrics.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from omegaconf import open_dict

from verl_rollout_corr.errors import HookError, InputError, MissingRolloutLogProbsError
from verl_rollout_corr.grammar import Invalid, Mode, RolloutCorrConfig
from verl_rollout_corr.hooks import activity, compat, notices
from verl_rollout_corr.hooks.applied import Applied
from verl_rollout_corr.hooks.first_invalid import FirstInvalid
from verl_rollout_corr.hooks.policy_loss import HOOKED_TRAINER
from verl_rollout_corr.hooks.transport import APPLIED_KEY, FIRST_INVALID_KEY, SUMS_KEY, gather
from verl_rollout_corr.hooks.weight_versions import history_of
from verl_rollout_corr.maths.correction import Correction, correct
from verl_rollout_corr.maths.inputs import check_valid
from verl_rollout_corr.maths.metric_table import PREFIX
from verl_rollout_corr.maths.metrics import finalize, staleness_share
from verl_rollout_corr.maths.sums import Sums


def missing_rollout_log_probs() -> MissingRolloutLogProbsError:
    """The error for a batch in which the engine's log-probs are absent."""
    return MissingRolloutLogProbsError(
        "rollout_corr: the batch has no rollout_log_probs, so nothing can be corrected; set "
        "actor_rollout_ref.rollout.calculate_log_probs=true, and see that the agent loop passes the engine's log-probs "
        "on"
    )


@dataclass(frozen=True)
class UpdateStatistics:
    """What updates of the actor leave behind: `+` joins them, and only what is joined becomes metrics."""

    sums: Sums
    applied: Applied

    def __add__(self, other: UpdateStatistics) -> UpdateStatistics:
        return UpdateStatistics(self.sums + other.sums, self.applied + other.applied)

    def metrics(self, floor: Sums) -> dict[str, float]:
        """The values of these updates; `floor` holds the run's rows of lag 0 so far."""
        values = finalize(self.sums)
        tokens = self.applied.tokens
        values[PREFIX + "applied_kept_fraction"] = self.applied.kept / tokens if tokens else 0.0
        kept = self.applied.kept
        values[PREFIX + "applied_clipped_fraction"] = self.applied.clipped / kept if kept else 0.0
        values[PREFIX + "applied_weight"] = self.applied.weight_sum / tokens if tokens else 0.0
        values[PREFIX + "staleness_share"] = staleness_share(self.sums, floor)
        return values


def joined(parts: Sequence[UpdateStatistics]) -> UpdateStatistics:
    """The statistics of one or more updates as one."""
    return functools.reduce(operator.add, parts)


@dataclass
class TrainerState:
    """What a trainer remembers between updates; lives on the trainer object."""

    floor: Sums | None = None  # every row so far; the rows of lag 0 in it tell the engine's share, at equal weights
    step: list[UpdateStatistics] = field(default_factory=list)
    given: set[str] = field(default_factory=set)  # kinds of warnings

    def take(self, sums: Sums, applied: Applied) -> UpdateStatistics:
        """The statistics of one update, which also enter the floor."""
        statistics = UpdateStatistics(sums.to("cpu"), applied)
        self.floor = statistics.sums if self.floor is None else self.floor + statistics.sums
        return statistics

    @property
    def seen(self) -> Sums:
        """The floor, once `take` has started it."""
        assert self.floor is not None
        return self.floor


def state_of(trainer: Any) -> TrainerState:
    """The state on this trainer, made on first use."""
    if not hasattr(trainer, "_rollout_corr_state"):
        trainer._rollout_corr_state = TrainerState()
    return trainer._rollout_corr_state


def decide_batch(
    columns: dict[str, torch.Tensor],
    spec: RolloutCorrConfig,
    *,
    uid: Any,
    staleness: torch.Tensor | None,
) -> Correction:
    """Corrects the whole batch in decoupled mode. `columns` are padded (B, T)."""
    if "rollout_log_probs" not in columns:
        raise missing_rollout_log_probs()
    return correct(
        columns["old_log_probs"],
        columns["rollout_log_probs"],
        columns["response_mask"],
        spec,
        advantages=columns["advantages"],
        group_ids=uid,
        staleness=staleness,
    )


def check_rollout(columns: dict[str, torch.Tensor], spec: RolloutCorrConfig) -> None:
    """Bypass mode's check of the engine's log-probs, before workers use them as pi_old. Raises InputError."""
    if "rollout_log_probs" not in columns:
        raise missing_rollout_log_probs()
    if spec.invalid is Invalid.ERROR:
        check_valid(columns["rollout_log_probs"], columns["response_mask"].bool())


@dataclass(frozen=True)
class FromWorkers:
    """What the workers sent with their metrics: `sums` in bypass mode, and `first_invalid` if it is to stop the run."""

    applied: Applied
    sums: Sums | None = None
    first_invalid: FirstInvalid | None = None


def take_worker_statistics(metrics: dict[str, Any], prefix: str) -> FromWorkers:
    """Removes what the workers sent from verl's metrics and returns the totals. Raises HookError if nothing came: the
    loss ran without us.
    """
    applied = metrics.pop(prefix + APPLIED_KEY, None)
    if applied is None:
        raise HookError(
            "rollout_corr: the actor updated without our loss: its metrics carry no "
            f"{prefix + APPLIED_KEY}. The worker's process did not load the hook"
        )
    sums, first_invalid = (metrics.pop(prefix + key, None) for key in (SUMS_KEY, FIRST_INVALID_KEY))
    return FromWorkers(
        gather(applied),
        None if sums is None else gather(sums),
        None if first_invalid is None else gather(first_invalid),
    )


def check_applied(applied: Applied, keep: torch.Tensor, mask: torch.Tensor, updates: int) -> None:
    """Raises HookError unless the loss saw exactly the tokens that the trainer decided on, `updates` (ppo_epochs)
    times.
    """
    expected = (int(mask.sum()) * updates, int(keep.sum()) * updates)
    found = (applied.tokens, applied.kept)
    if found != expected:
        raise HookError(
            f"rollout_corr: the actor's loss saw {found[0]} response tokens of which {found[1]} kept, the trainer "
            f"decided on {expected[0]} and {expected[1]}: the batch was changed on its way"
        )


def conclude(
    trainer: Any,
    spec: RolloutCorrConfig,
    sums: Sums | None,
    workers: FromWorkers,
    mask: torch.Tensor,
    *,
    padding: int = 0,
) -> tuple[UpdateStatistics, dict[str, float]]:
    """What an update leaves behind, and its metrics; warns of what is the first of its kind.

    `sums` are the trainer's, or None where the workers decided. `mask` is the (B, T) response mask of the batch, of
    which `padding` rows are verl's own. Raises HookError if there are no statistics, and InputError if the workers met
    an invalid log-prob in bypass mode and `invalid: error`: only the forward pass knows it, and the loss does not wait
    for the host.
    """
    sums = workers.sums if sums is None else sums
    if sums is None:
        raise HookError("rollout_corr: the workers sent no statistics in bypass mode")
    state = state_of(trainer)
    statistics = state.take(sums, workers.applied)
    values = statistics.metrics(state.seen)
    invalid = values[PREFIX + "invalid_seq_fraction"]
    if invalid and workers.first_invalid is not None:
        raise InputError(
            f"rollout_corr: the trainer's log-prob is {workers.first_invalid}, and {invalid:.2%} of the sequences of "
            "the update have an invalid one: the forward pass gave NaN, +inf or a log-prob above 0 (the engine's were "
            "checked before). They were left out of the update, and the run stops after it. Fix the source, or set "
            "rollout_corr.invalid=reject to go on without such sequences and count them"
        )
    untrainable = int((~mask.bool().any(dim=1)).sum()) - padding
    update = notices.Update(trainer.config, spec, workers.applied, values, padding=padding, untrainable=untrainable)
    notices.give(update, state.given)
    return statistics, values


def admit(trainer: Any, spec: RolloutCorrConfig, config: Any) -> None:
    """Before the first worker starts: says what is active in the trainer's process, and tells the actors that it is.

    The actors' configuration is handed out after this. An actor that does not find the trainer's name in it refuses to
    be built, so that a trainer which is not hooked gets no actor. Raises HookError for a trainer that is not known.
    """
    known = compat.known_trainer(type(trainer))
    activity.announce("trainer", spec)
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    with open_dict(policy_loss):
        policy_loss[HOOKED_TRAINER] = known.path


def horizon(config: Any) -> int:
    """The longest response that the run allows, in tokens: the same constant in every trainer, micro-batch and rank."""
    return int(config.actor_rollout_ref.rollout.response_length)


def old_policy_updates(trainer: Any, spec: RolloutCorrConfig, known: compat.Trainer) -> int:
    """How many updates pi_train had seen: pi_old's in decoupled mode, the current policy's in bypass mode."""
    history = history_of(trainer.actor_rollout_wg)
    if spec.mode is Mode.DECOUPLED and known.restores_old_policy:
        return history.last_published
    return history.updates
