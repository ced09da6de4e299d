"""Warnings of a running job, once per kind: batches that train little or nothing, and numbers that show that something
is wrong with the log-probs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verl_rollout_corr.grammar import Baseline, Denominator, Invalid, Level, RolloutCorrConfig
from verl_rollout_corr.hooks.advantages import GROUPED_ESTIMATORS
from verl_rollout_corr.hooks.applied import Applied
from verl_rollout_corr.maths.metrics import PREFIX


@dataclass(frozen=True)
class Line:
    """One line of the log, about one update or several.

    `run` is verl's whole configuration, `config` ours. Then what the loss was given, the metrics, the rows that verl
    added itself (`padding`), the other rows without a response token (`untrainable`), and the mean k3 of the tokens
    that the newest weights sampled (`fresh_k3`).
    """

    run: Any
    config: RolloutCorrConfig
    applied: Applied
    values: Mapping[str, float]
    padding: int = 0
    untrainable: int = 0
    fresh_k3: float | None = None

    def value(self, name: str) -> float:
        """A metric, by its name without the prefix."""
        return self.values[PREFIX + name]


def _all_rejected(line: Line) -> str | None:
    if not line.applied.tokens or line.applied.kept or line.value("invalid_seq_fraction") == 1:
        return None
    return (
        "every response token of a batch was rejected: the update is zero. Compare rollout_corr/rollout_rs_*_mean with "
        "the bounds"
    )


def _empty_rank(line: Line) -> str | None:
    ranks = line.applied.empty_ranks
    if not ranks or not line.applied.kept:
        return None
    return f"every response token of rank {ranks[0]} was rejected: it adds zero to the gradient, the others train on"


def _empty_micro_batch(line: Line) -> str | None:
    if not line.applied.empty_micro_batches or not line.applied.kept:
        return None
    more = line.config.denominator is Denominator.KEPT
    return (
        f"every response token of {line.applied.empty_micro_batches} micro-batches of an update was rejected: they "
        f"add zero to the gradient, and the others weigh {'more' if more else 'no more'} for it (denominator: "
        f"{line.config.denominator})"
    )


def _padding(line: Line) -> str | None:
    if not line.padding:
        return None
    return (
        f"verl filled a batch up with {line.padding} padding rows: they are in no metric, and train nothing; in the "
        "modes seq-mean-* of loss_agg_mode verl counts them as rows"
    )


def _untrainable(line: Line) -> str | None:
    if not line.untrainable:
        return None
    return f"{line.untrainable} rows of a batch have no response token: they are in no metric, and train nothing"


def _invalid(line: Line) -> str | None:
    fraction = line.value("invalid_seq_fraction")
    if not fraction:
        return None
    return (
        f"{fraction:.2%} of the sequences of a batch have a log-prob that cannot be one (NaN, +inf, above 0, or -inf "
        "from the engine), and were rejected for it"
    )


def _exact_zeros(line: Line) -> str | None:
    for side, whose in (("rollout", "the engine"), ("train", "the trainer")):
        fraction = line.value(f"exact_zero_{side}_fraction")
        if fraction:
            cause = "missing log-probs that were stored as 0.0, or tokens that a framework appended"
            if side == "rollout" and _truncates(line.run.actor_rollout_ref.rollout):
                cause = "top_p or top_k left one candidate, whose probability is 1 to the engine; or " + cause
            return (
                f"{fraction:.2%} of the tokens of a batch have the log-prob 0.0 exactly on the side of {whose} only: "
                f"{cause}. They are corrected as if they were right (rollout_corr/exact_zero_{side}_fraction)"
            )
    return None


def _truncates(rollout: Any) -> bool:
    """Whether the engine samples from a part of the vocabulary."""
    return rollout.top_p < 1 or rollout.top_k > 0


def _constant(line: Line) -> str | None:
    """With `invalid: error` the run stops instead, unless both sides are sure of all of the tokens."""
    fraction = line.value("constant_rollout_row_fraction")
    if not fraction or line.config.invalid is Invalid.ERROR:
        return None
    return (
        f"{fraction:.2%} of the rows of a batch have one log-prob of the engine for all of their tokens, where the "
        "trainer's differ: a value that stands for no log-prob. They are corrected as if it were right "
        "(rollout_corr/constant_rollout_row_fraction)"
    )


SILENT = 0.05
"""A smaller mean weight of the kept tokens gives a warning: the weights make the update vanish."""


def _silenced(line: Line) -> str | None:
    weights = line.config.weights
    if weights is None or not line.applied.kept:
        return None
    mean = line.applied.weight_sum / line.applied.kept
    if mean >= SILENT:
        return None
    product = weights.level in (Level.TURN_SUM, Level.SEQ_SUM, Level.PREFIX_SUM)
    mean_of = "turn_mean (turn_is)" if weights.level is Level.TURN_SUM else "seq_mean (geo_is)"
    return (
        f"the weights of the kept tokens are {mean:.2g} in the mean, so that the update is that much smaller than its "
        "learning rate says. "
        + (
            f"rollout_corr.weights.level={weights.level} multiplies the ratios of many tokens, and a small difference "
            f"per token makes that vanish with the length: level={mean_of} or level=token (token_is) survives it"
            if product
            else "The trainer gives these tokens far less probability than the engine: compare "
            "rollout_corr/abs_log_ratio_p50 with a run of fresh weights"
        )
        + " (rollout_corr/applied_weight)"
    )


STRANGERS = 0.5
"""A larger k3 per token at equal weights gives a warning: engine and trainer hardly describe the same tokens."""


def _strangers(line: Line) -> str | None:
    if line.fresh_k3 is None or line.fresh_k3 <= STRANGERS:
        return None
    return (
        f"k3 per token is {line.fresh_k3:.3g} for samples of the weights that are trained, where numerics leave less "
        "than 0.01: engine and trainer do not describe the same tokens. Look for log-probs that are shifted by a "
        "token, another temperature or template, or weights that did not reach the engine "
        "(rollout_corr/noise_floor_k3_kl)"
    )


CLIPPED = 0.2
"""A larger share of kept tokens whose gradient PPO's clip removes gives a warning."""


def _clip_spent(line: Line) -> str | None:
    """In bypass mode PPO clips around the engine's policy, so the mismatch uses up a part of the clip range."""
    fraction = line.value("applied_clipped_fraction")
    if fraction < CLIPPED:
        return None
    return (
        f"PPO's clip silences {fraction:.0%} of the kept tokens of an update. In bypass mode it is around the engine's "
        "policy, so that the mismatch uses it up, besides what earlier mini-batches changed; the mean of |r - 1| is "
        f"{line.value('abs_ratio_diff'):.3g}. Take a preset of decoupled mode, or rollout_corr.loss=reinforce, or "
        "widen clip_ratio (rollout_corr/applied_clipped_fraction)"
    )


def _no_groups(line: Line) -> str | None:
    if line.config.baseline is Baseline.ALL:
        return None
    estimator = line.run.algorithm.adv_estimator
    if estimator in GROUPED_ESTIMATORS:
        return None
    return (
        f"rollout_corr.baseline=kept changes nothing with algorithm.adv_estimator={estimator}: it has no baseline "
        "over the rows of a group in which rejected rows could vote"
    )


def _lags_unknown(line: Line) -> str | None:
    """A criterion that never rejects has no effect. A metric shows it, but it may be overlooked there."""
    if not line.config.needs_staleness or line.value("rollout_rs_lag_unknown_fraction") < 1:
        return None
    return (
        "rollout_corr.reject.lag let every row of an update pass, since the lag of none is known: verl gave no number "
        "of the weights that sampled them (rollout_corr/rollout_rs_lag_unknown_fraction)"
    )


NOTICES: dict[str, Callable[[Line], str | None]] = {
    "all_rejected": _all_rejected,
    "empty_rank": _empty_rank,
    "empty_micro_batch": _empty_micro_batch,
    "padding": _padding,
    "untrainable": _untrainable,
    "invalid": _invalid,
    "exact_zeros": _exact_zeros,
    "constant": _constant,
    "silenced": _silenced,
    "strangers": _strangers,
    "clip_spent": _clip_spent,
    "no_groups": _no_groups,
    "lags_unknown": _lags_unknown,
}
"""Every kind, and its message for a line, if there is one."""


def give(line: Line, given: set[str]) -> None:
    """Prints each warning that this line gives for the first time. `given`, the kinds printed so far, is changed."""
    for kind, message_of in NOTICES.items():
        message = None if kind in given else message_of(line)
        if message is not None:
            given.add(kind)
            print(f"[rollout_corr] warning: {message}", flush=True)
