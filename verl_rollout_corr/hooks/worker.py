"""The actor's loss with the correction in front of it.

Decoupled mode: the trainer's decision arrives as columns. Bypass mode: the decision is made here, from the current
policy, at every micro-batch. In both, rejected tokens are neutralised before verl's own loss runs: their log-probs,
advantages and entropies become constants whose terms are 0 and carry no gradient. The response mask stays as it is
(`denominator: all`), or becomes `keep`, with the matching counts to divide by (`denominator: kept`).

Nothing here waits for the device: a host copy per micro-batch would stall a GPU (tests/hooks/test_host_sync.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from verl_rollout_corr.errors import HookError
from verl_rollout_corr.grammar import Denominator, Invalid, Loss, Mode, RolloutCorrConfig
from verl_rollout_corr.hooks import wire
from verl_rollout_corr.hooks.applied import Applied
from verl_rollout_corr.hooks.configured import config_of_actor
from verl_rollout_corr.hooks.denominators import count_kept, set_counts, with_horizon
from verl_rollout_corr.hooks.entrance import constant_rows
from verl_rollout_corr.hooks.first_invalid import first_invalid
from verl_rollout_corr.hooks.guard import guard, try_once
from verl_rollout_corr.hooks.ledger import Call, calling, checked_before_step, poison
from verl_rollout_corr.hooks.places import Places, flat, neutralise, padded
from verl_rollout_corr.hooks.policy_loss import clip_bounds
from verl_rollout_corr.hooks.proof import Subject, decision_digests
from verl_rollout_corr.hooks.share import config_of_worker, current_share, update_of
from verl_rollout_corr.hooks.transport import Carried
from verl_rollout_corr.kernels.on_gpu import decide
from verl_rollout_corr.maths.inputs import warn_half
from verl_rollout_corr.maths.losses import clipped
from verl_rollout_corr.maths.sums import Sums

LossFunction = Callable[..., tuple[Tensor, dict[str, Any]]]
"""verl's `ppo_loss`: a micro-batch's loss and its metrics."""

_CORRECTS = "__rollout_corr_corrects__"

_COLUMNS = (
    "response_mask",
    "old_log_probs",
    "advantages",
    "ref_log_prob",
    wire.WEIGHTS,
    wire.KEEP,
    wire.STALENESS,
    wire.ROW,
    wire.DIGEST,
)


@dataclass(frozen=True)
class _Decided:
    """A micro-batch's decision: `keep` (B, T) bool, `weights` (B, T), and of bypass mode what it sends to the trainer,
    and where they stop the run, the `first_invalid` log-prob and the `constant_rows` (B,).
    """

    keep: Tensor
    weights: Tensor | None
    sums: Sums | None = None
    clipped: Tensor | None = None
    invalid: Tensor | None = None
    constant: Tensor | None = None


def _required(columns: Mapping[str, Tensor], name: str, consequence: str) -> Tensor:
    """A column that the hooked trainer ships."""
    if name not in columns:
        raise HookError(
            f"rollout_corr: the actor's batch has no column {name}, so the trainer's process {consequence}: the "
            "plug-in is not installed or not loaded there (VERL_USE_EXTERNAL_PLUGINS?), or the trainer is not supported"
        )
    return columns[name]


def _decided_by_trainer(columns: Mapping[str, Tensor], config: RolloutCorrConfig) -> _Decided:
    """Decoupled mode."""
    keep = _required(columns, wire.KEEP, "did not correct it")
    if config.weights is None:
        return _Decided(keep.bool(), columns.get(wire.WEIGHTS))
    return _Decided(keep.bool(), _required(columns, wire.WEIGHTS, "gave it no weights"))


def _check_bound(loss: Any) -> None:
    """Raises HookError if this worker holds a loss without the correction, though with its configuration."""
    if not hasattr(loss.func, _CORRECTS):
        raise HookError(
            f"rollout_corr: this worker was given {loss.func.__module__}.{loss.func.__qualname__} as the actor's loss, "
            "without the correction in front of it: something has put verl's own function back before the worker was "
            "built. Nothing was trained on"
        )


def _decide_here(
    actor: Any, config: RolloutCorrConfig, train_log_probs: Tensor, columns: Mapping[str, Tensor]
) -> _Decided:
    """Bypass mode, from the current policy's log-probs (B, T): verl's `old_log_probs` are the engine's there."""
    rollout_log_probs = columns["old_log_probs"]
    warn_half(train_log_probs, rollout_log_probs)
    if config.needs_staleness:
        _required(columns, wire.STALENESS, "did not say how old the rows are, which reject.lag asks")
    decision = decide(
        train_log_probs,
        rollout_log_probs,
        columns["response_mask"],
        config,
        advantages=columns["advantages"],
        staleness=columns.get(wire.STALENESS),
    )
    beyond_clip = None
    if config.loss is Loss.PPO_CLIP:  # before any token is neutralised
        low, high = clip_bounds(actor)
        beyond_clip = clipped(train_log_probs, rollout_log_probs, columns["advantages"], clip_low=low, clip_high=high)
    found = _Decided(decision.keep.bool(), decision.weights, decision.sums, beyond_clip)
    if config.invalid is not Invalid.ERROR:
        return found
    compared = (train_log_probs, rollout_log_probs, columns["response_mask"])
    return replace(found, invalid=first_invalid(columns[wire.ROW], *compared), constant=constant_rows(*compared))


def _micro_batch(
    data: TensorDict, columns: Mapping[str, Tensor], keep: Tensor, config: RolloutCorrConfig
) -> TensorDict:
    """A shallow copy of the micro-batch with these columns, and with the counts that its means divide by."""
    changed = data.copy()
    for name, column in columns.items():
        if name not in (wire.KEEP, wire.STALENESS, wire.ROW, wire.DIGEST):
            changed[name] = column
    set_counts(changed, keep, columns["response_mask"], config)
    return changed


def wrap_ppo_loss(original: LossFunction) -> LossFunction:
    """The actor's loss of verl with the correction in front of it; verl's own where no preset is on."""

    @functools.wraps(original)
    def ppo_loss(config: Any, model_output: dict[str, Any], data: TensorDict, dp_group: Any = None) -> Any:
        actor, ours = config, config_of_actor(config)
        if ours is None:
            return original(config=actor, model_output=model_output, data=data, dp_group=dp_group)
        guard(actor.policy_loss.loss_mode)
        columns = padded(data, _COLUMNS)
        for name in (wire.ROW, wire.DIGEST):
            _required(columns, name, "did not say what it decided on")
        mask = columns["response_mask"].bool()
        places = Places.of(data, mask.shape[1])
        if ours.mode is Mode.BYPASS:
            decided = _decide_here(actor, ours, places.read(model_output["log_probs"].detach()), columns)
        else:
            decided = _decided_by_trainer(columns, ours)
        digests = _digests(data, columns, places, decided, ours)
        if decided.weights is not None:
            columns[wire.WEIGHTS] = decided.weights
        kept = mask & decided.keep
        # log pi_old = -inf is legal, but a ratio to it is not a number: such a token adds 0 to the loss, and is counted
        # as usual.
        trained = kept & (columns["old_log_probs"] != -torch.inf)
        silent = places.marked(~trained, flat(model_output["log_probs"]).shape[0])
        quiet_output, quiet_columns = neutralise(model_output, columns, trained, silent)
        call = Call.on(mask, columns[wire.ROW], columns[wire.DIGEST], digests)
        if decided.invalid is not None:
            call.invalid = decided.invalid
        if decided.constant is not None:
            call.look_for_constants(decided.constant, columns[wire.ROW])
        for name in ("log_probs", "entropy"):
            if model_output.get(name) is not None:
                call.watch(model_output[name], silent)
        prepared = _micro_batch(data, quiet_columns, decided.keep, ours)
        with calling(call):
            loss, metrics = original(
                config=with_horizon(actor, data), model_output=quiet_output, data=prepared, dp_group=dp_group
            )
        applied_weights = call.compare(
            {
                "log_prob": places.read(quiet_output["log_probs"].detach()),
                "old_log_prob": quiet_columns["old_log_probs"],
                "advantages": quiet_columns["advantages"],
                "response_mask": mask & decided.keep if ours.denominator is Denominator.KEPT else mask,
                "rollout_is_weights": quiet_columns.get(wire.WEIGHTS),
            },
            mask,
        )
        metrics.update(_to_trainer(dp_group, mask, kept, applied_weights, digests, decided))
        return loss * poison(call.sound, loss.dtype), metrics

    setattr(ppo_loss, _CORRECTS, True)
    return ppo_loss


def _digests(
    data: TensorDict, columns: Mapping[str, Tensor], places: Places, decided: _Decided, config: RolloutCorrConfig
) -> Tensor:
    """Digests (B,) of what the trainer decided on each row, computed from what arrived; in bypass mode, of what the
    decision is based on. The tokens are those of which the model computes the log-probs.
    """
    tokens = places.tokens(data["input_ids"])
    subject = Subject(
        columns[wire.ROW],
        {**columns, "responses": tokens},
        update_of(data),
        columns["old_log_probs"],
        columns.get(wire.STALENESS),
    )
    chosen = (None, None) if config.mode is Mode.BYPASS else (decided.keep, decided.weights)
    return decision_digests(subject, *chosen)


def _to_trainer(
    dp_group: Any, mask: Tensor, kept: Tensor, weights: Tensor | None, digests: Tensor, decided: _Decided
) -> dict[str, Carried]:
    """What the loss of a micro-batch sends to the trainer with verl's metrics."""
    rank = _rank(dp_group)
    sent = {
        wire.APPLIED_METRIC: Applied.to_micro_batch(rank, mask, kept, weights, decided.clipped, digests),
        wire.SUMS_METRIC: decided.sums,
    }
    return {key: Carried(content) for key, content in sent.items() if content is not None}


def _rank(dp_group: Any) -> int:
    """The data-parallel rank of this worker."""
    return torch.distributed.get_rank(dp_group) if torch.distributed.is_initialized() else 0


def wrap_train_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around a mini-batch: counts what the loss of a micro-batch cannot know, and checks what the losses did before the
    optimiser steps.
    """

    @functools.wraps(original)
    def train_batch(self: Any, data: TensorDict) -> Any:
        config = config_of_worker(self, data)
        if config is None:
            return original(self, data)
        _check_bound(self.loss_fn)
        try_once(self.loss_fn.keywords["config"], config)
        share = current_share()
        share.confirm(self)
        if config.denominator is Denominator.KEPT:
            count_kept(self, data)
        with checked_before_step(self.engine, data, share):
            return original(self, data)

    return train_batch
