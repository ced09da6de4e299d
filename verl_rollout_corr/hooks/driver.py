"""One update of the actor, the same in every trainer.

Fetch the batch, decide, ship the decision, let verl train, compare what the workers applied with what was decided, and
keep the statistics. Trainers differ in where a batch lives: an `Adapter` fetches from there and ships to there.
`driver_v0.py` has the one for a DataProto, `driver_v1.py` the one for verl's TransferQueue.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import open_dict
from torch import Tensor

from verl_rollout_corr.errors import HookError
from verl_rollout_corr.grammar import Invalid, Mode, RolloutCorrConfig
from verl_rollout_corr.hooks import activity, as_written, compat, dump, same_code, wire
from verl_rollout_corr.hooks.applied import Applied
from verl_rollout_corr.hooks.batches import Adapter, Decided, TrainerBatch
from verl_rollout_corr.hooks.entrance import check_not_constant
from verl_rollout_corr.hooks.proof import Subject, decision_digests, total
from verl_rollout_corr.hooks.seams import Trainer
from verl_rollout_corr.hooks.share import sent_along
from verl_rollout_corr.hooks.transport import gather
from verl_rollout_corr.hooks.updates import UpdateStatistics, state_of
from verl_rollout_corr.hooks.weight_versions import history_of
from verl_rollout_corr.kernels.choice import correct
from verl_rollout_corr.maths.inputs import check_valid, invalid_tokens
from verl_rollout_corr.maths.scopes import row_offsets, to_padded
from verl_rollout_corr.maths.sums import Sums

_BY_WORKERS = "actor/"
"""What verl puts before the name of a worker's metric."""


def update_actor(
    trainer: Any, config: RolloutCorrConfig, adapter: Adapter
) -> tuple[Any, dict[str, Any], UpdateStatistics]:
    """One update. Returns verl's answer, its metrics without our own entries, and the statistics of the update.

    Raises InputError for a batch that cannot be corrected, HookError if the workers did not apply the decision or run
    other code than this process.
    """
    state = state_of(trainer)
    if state.known is None:
        state.known = _before_the_first(trainer)
    dumps = config.dump.takes(trainer.global_steps)
    batch = adapter.fetch(dump.COLUMNS if dumps else ())
    history = history_of(trainer.actor_rollout_wg)
    lags = history.lags(batch.versions, _updates_behind_train(trainer, config, state.known))
    decided = decide_batch(batch, config, lags, update=history.updates)
    along = sent_along(config, decided.digests, history.updates, trainer.config.actor_rollout_ref)
    adapter.ship(decided.columns, {wire.HORIZON: horizon(trainer.config)} | along)
    as_written.check("the trainer")
    with dump.written(trainer, config, batch, decided, lags) if dumps else nullcontext():
        answer, metrics = adapter.train()
    history.updates += 1
    workers = take_worker_statistics(metrics)
    epochs = trainer.config.actor_rollout_ref.actor.ppo_epochs
    check_applied(workers.applied, batch.response_mask, decided, epochs)
    statistics = conclude(config, decided.sums, workers, batch)
    state.take(statistics)
    return answer, metrics, statistics


def _before_the_first(trainer: Any) -> Trainer:
    """The entry of this trainer. Raises HookError if it has none, or if its actors run other code than this process."""
    known = compat.known_trainer(type(trainer))
    same_code.check_actors(trainer.actor_rollout_wg)
    return known


def decide_batch(batch: TrainerBatch, config: RolloutCorrConfig, lags: Tensor, *, update: int = 0) -> Decided:
    """The correction of the whole batch in decoupled mode; in bypass mode the checks that need no forward pass.
    `update` is its number.

    Raises InputError for a log-prob of the engine that cannot be one, unless `invalid: reject`.
    """
    rows = torch.arange(len(lags))
    if config.mode is Mode.BYPASS:
        _check_rollout(batch, config)
        subject = Subject(rows, batch.columns, update, batch.rollout_log_probs, lags)
        digests = decision_digests(subject, None, None)
        return Decided({wire.STALENESS: lags, wire.ROW: rows, wire.DIGEST: digests}, digests)
    result = correct(
        batch.columns["old_log_probs"],
        batch.rollout_log_probs,
        batch.response_mask,
        config,
        advantages=batch.columns["advantages"],
        group_ids=batch.group_ids,
        staleness=lags,
    )
    compared = (batch.columns["old_log_probs"], batch.rollout_log_probs, batch.response_mask)
    check_not_constant(result.sums, lambda: [to_padded(column) for column in compared], config)
    subject = Subject(rows, batch.columns, update, batch.rollout_log_probs)
    digests = decision_digests(subject, result.keep, result.weights)
    columns = {wire.KEEP: result.keep, wire.ROW: rows, wire.DIGEST: digests}
    if result.weights is not None:
        columns[wire.WEIGHTS] = result.weights
    return Decided(columns, digests, result.keep, result.sums)


def _check_rollout(batch: TrainerBatch, config: RolloutCorrConfig) -> None:
    """Bypass mode's check of the engine's log-probs, before workers use them as pi_old."""
    rollout, mask = batch.rollout_log_probs, batch.response_mask
    if config.invalid is not Invalid.ERROR:
        return
    flat, inside = _tokens(rollout), _tokens(mask).bool()
    if bool(invalid_tokens(flat, flat, inside).any()):
        check_valid(to_padded(rollout), to_padded(mask).bool())


def _tokens(column: Tensor) -> Tensor:
    """The values of a column as one flat tensor; of a jagged column, only those inside its rows."""
    return column.contiguous().values() if column.is_nested else column


def tokens_of_rows(mask: Tensor) -> Tensor:
    """(B,): the number of tokens of each row for which the mask, padded or jagged, is 1."""
    if not mask.is_nested:
        return mask.bool().sum(dim=1)
    mask = mask.contiguous()
    before = torch.nn.functional.pad(mask.values().bool().long().cumsum(dim=0), (1, 0))
    return before[row_offsets(mask)].diff()


@dataclass(frozen=True)
class FromWorkers:
    """What the workers sent with their metrics; `sums` in bypass mode."""

    applied: Applied
    sums: Sums | None = None


def take_worker_statistics(metrics: dict[str, Any]) -> FromWorkers:
    """Takes our entries out of verl's metrics and returns their totals. Raises HookError if there are none: verl's loss
    ran without the correction.
    """
    applied, sums = (metrics.pop(_BY_WORKERS + key, None) for key in (wire.APPLIED_METRIC, wire.SUMS_METRIC))
    if applied is None:
        raise HookError(
            "rollout_corr: the actor updated without our loss: its metrics carry no "
            f"{_BY_WORKERS + wire.APPLIED_METRIC}. The worker's process did not load the hook"
        )
    return FromWorkers(gather(applied), None if sums is None else gather(sums))


def check_applied(applied: Applied, mask: Tensor, decided: Decided, epochs: int) -> None:
    """Raises HookError unless the loss of all ranks together saw exactly the tokens of the batch and what was decided
    on each of them, `epochs` times. In bypass mode the loss decides which are kept.
    """
    tokens = int(tokens_of_rows(mask).sum()) * epochs
    if applied.tokens != tokens:
        raise HookError(
            f"rollout_corr: the actor's loss saw {applied.tokens} response tokens, the batch has {tokens} with all "
            "epochs: it was changed on its way, or some rank trained without our loss"
        )
    if decided.keep is not None:
        kept = int(tokens_of_rows(decided.keep).sum()) * epochs
        if applied.kept != kept:
            raise HookError(
                f"rollout_corr: the actor's loss kept {applied.kept} of {tokens} response tokens, the trainer decided "
                f"on {kept}: the decision was changed on its way"
            )
    if applied.digest != total(decided.digests, epochs):
        raise HookError(
            "rollout_corr: the actor's loss saw as many tokens as the trainer decided on, but not the same decision: "
            "the weights, the rejected tokens, the advantages or the log-probs of the batch were changed on their way"
        )


def conclude(
    config: RolloutCorrConfig, sums: Sums | None, workers: FromWorkers, batch: TrainerBatch
) -> UpdateStatistics:
    """What an update leaves behind. `sums` are the trainer's, or None where the workers decided.

    Raises HookError if there are no statistics.
    """
    sums = workers.sums if sums is None else sums
    if sums is None:
        raise HookError("rollout_corr: the workers sent no statistics in bypass mode")
    sums = sums.to("cpu")
    empty = int((tokens_of_rows(batch.response_mask) == 0).sum())
    return UpdateStatistics(sums, workers.applied, padding=batch.padding, untrainable=empty - batch.padding)


def admit(trainer: Any, config: RolloutCorrConfig, run: Any) -> None:
    """Before the first worker starts: says what is active in the trainer's process, and tells the actors that it is.

    The actors' configuration is handed out after this. An actor that does not find the trainer's name in it refuses to
    be built, so that a trainer which is not hooked gets no actor. Raises HookError for a trainer that is not known.
    """
    known = compat.known_trainer(type(trainer))
    same_code.check_against_driver("the trainer")
    activity.announce("trainer", config)
    policy_loss = run.actor_rollout_ref.actor.policy_loss
    with open_dict(policy_loss):
        policy_loss[wire.HOOKED_TRAINER] = known.path


def horizon(run: Any) -> int:
    """The longest response that the run allows, in tokens: the same constant in every trainer, micro-batch and rank."""
    return int(run.actor_rollout_ref.rollout.response_length)


def _updates_behind_train(trainer: Any, config: RolloutCorrConfig, known: Trainer) -> int:
    """How many updates had been made when pi_train was computed: it is pi_old in decoupled mode, the current policy in
    bypass mode.
    """
    history = history_of(trainer.actor_rollout_wg)
    if config.mode is Mode.DECOUPLED and known.restores_old_policy:
        return history.last_published
    return history.updates
