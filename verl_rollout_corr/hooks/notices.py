"""What a run is warned of while it goes on, once per kind: batches of which little or nothing is trained on, and
numbers that say that something is wrong with the log-probs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verl_rollout_corr.grammar import Mode, RolloutCorrConfig
from verl_rollout_corr.hooks.applied import Applied


@dataclass(frozen=True)
class Update:
    """One update of the actor: what `config` (verl's whole configuration) and `spec` asked for, what the loss was
    given, the metrics, and the rows without a response token, `padding` of which verl added itself.
    """

    config: Any
    spec: RolloutCorrConfig
    applied: Applied
    values: Mapping[str, float]
    padding: int = 0
    untrainable: int = 0

    def value(self, name: str) -> float:
        """A metric, by its name without the prefix."""
        return self.values["rollout_corr/" + name]


def _all_rejected(update: Update) -> str | None:
    if not update.applied.tokens or update.applied.kept:
        return None
    return (
        "every response token of a batch was rejected: the update is zero. Compare rollout_corr/rollout_rs_*_mean with "
        "the bounds"
    )


def _empty_rank(update: Update) -> str | None:
    ranks = update.applied.empty_ranks
    if not ranks or not update.applied.kept:
        return None
    return f"every response token of rank {ranks[0]} was rejected: it adds zero to the gradient, the others train on"


def _empty_micro_batch(update: Update) -> str | None:
    if not update.applied.empty_micro_batches or not update.applied.kept:
        return None
    return (
        f"every response token of {update.applied.empty_micro_batches} micro-batches of an update was rejected: they "
        "add zero to the gradient, and the others weigh no more for it"
    )


def _padding(update: Update) -> str | None:
    if not update.padding:
        return None
    return f"verl filled a batch up with {update.padding} padding rows: they are in no metric, and train nothing"


def _untrainable(update: Update) -> str | None:
    if not update.untrainable:
        return None
    return f"{update.untrainable} rows of a batch have no response token: they are in no metric, and train nothing"


def _invalid(update: Update) -> str | None:
    fraction = update.value("invalid_seq_fraction")
    if not fraction:
        return None
    return f"{fraction:.2%} of the sequences of a batch have log-probs that are no numbers, and were rejected for it"


def _exact_zeros(update: Update) -> str | None:
    for side, whose in (("rollout", "the engine"), ("training", "the trainer")):
        fraction = update.value(f"exact_zero_{side}_fraction")
        if fraction:
            return (
                f"{fraction:.2%} of the tokens of a batch have the log-prob 0.0 exactly on the side of {whose} only: "
                "missing log-probs that were stored as 0.0, or tokens that a framework appended and the model did not "
                f"sample. They are corrected as if they were right (rollout_corr/exact_zero_{side}_fraction)"
            )
    return None


def _clip_spent(update: Update) -> str | None:
    """PPO's clip is around the engine's policy in bypass mode: the gap between the engines uses it up."""
    if update.spec.mode is not Mode.BYPASS or update.spec.loss != "ppo_clip":
        return None
    actor = update.config.actor_rollout_ref.actor
    bounds = [actor.clip_ratio if bound is None else bound for bound in (actor.clip_ratio_low, actor.clip_ratio_high)]
    found = update.value("abs_ratio_diff")
    if found < min(bounds) / 2:
        return None
    return (
        f"the ratio of pi_theta to the engine is {found:.3g} from 1 on average, and clip_ratio is {min(bounds):g}: "
        "the mismatch alone takes tokens out of PPO's clip, and they learn nothing. Compare actor/pg_clipfrac; take a "
        "preset of decoupled mode, or rollout_corr.loss=reinforce"
    )


NOTICES: dict[str, Callable[[Update], str | None]] = {
    "all_rejected": _all_rejected,
    "empty_rank": _empty_rank,
    "empty_micro_batch": _empty_micro_batch,
    "padding": _padding,
    "untrainable": _untrainable,
    "invalid": _invalid,
    "exact_zeros": _exact_zeros,
    "clip_spent": _clip_spent,
}
"""Every kind, and its message for an update, if there is one."""


def give(update: Update, given: set[str]) -> None:
    """Prints what this update is the first of its kind for. `given`, the kinds so far, is changed."""
    for kind, message_of in NOTICES.items():
        message = None if kind in given else message_of(update)
        if message is not None:
            given.add(kind)
            print(f"[rollout_corr] warning: {message}", flush=True)
