"""A configuration in sentences: what a run will do."""

from __future__ import annotations

from verl_rollout_corr.grammar import (
    LEVELS,
    Agg,
    Baseline,
    Bounds,
    Criterion,
    Denominator,
    Invalid,
    Level,
    Loss,
    Mode,
    Outside,
    RolloutCorrConfig,
    Scope,
    Stat,
    Weights,
    When,
)

NOUNS: dict[Scope, str] = {
    Scope.TOKEN: "token",
    Scope.TURN: "turn",
    Scope.SEQ: "sequence",
    Scope.BATCH: "batch",
}
"""What a unit of each scope is called."""

_CONDITIONS: dict[When, str] = {
    When.NEGATIVE_ADVANTAGE: "its mean advantage is below 0",
    When.POSITIVE_ADVANTAGE: "its mean advantage is above 0",
    When.OUTWARD: "the update would push it further from the engine's policy",
}


def sentences(config: RolloutCorrConfig) -> list[str]:
    """What a run with this configuration does, a sentence each, in the order in which it happens."""
    said = [_mode(config), _weights(config.weights) if config.weights else "No importance weights."]
    said += [_criterion(criterion) for criterion in config.reject] or ["No rejection."]
    if len(config.reject) > 1:
        said.append("A token must pass every criterion; each is judged on all response tokens.")
    if config.min_group_kept is not None:
        said.append(f"Rejects a whole group in which fewer than {config.min_group_kept} sequences have a kept token.")
    if config.reject or config.min_group_kept is not None:
        said.append(
            "A rejected token adds 0 to the loss and still counts in its mean."
            if config.denominator is Denominator.ALL
            else "A rejected token adds 0 to the loss and leaves its mean, so the others weigh more."
        )
    if config.baseline is Baseline.KEPT:
        said.append("Rows with no kept token do not count in the baseline of their group.")
    said.append(
        "A log-prob that cannot be one stops the run."
        if config.invalid is Invalid.ERROR
        else "A log-prob that cannot be one rejects its sequence, which is counted."
    )
    return said


def does_nothing(config: RolloutCorrConfig) -> bool:
    """Whether the configuration only measures: no weights, nothing that rejects a valid row, and verl's own loss."""
    corrects = config.weights is not None or config.reject or config.min_group_kept is not None
    return config.mode is Mode.DECOUPLED and not corrects


def band(bounds: Bounds) -> str:
    """Bounds as a reader says them: `at most 2`, `at least 0.5`, `in [0.5, 2]`; empty without bounds."""
    lower, upper = bounds.lower, bounds.upper
    if lower is None:
        return "" if upper is None else f"at most {upper:g}"
    return f"at least {lower:g}" if upper is None else f"in [{lower:g}, {upper:g}]"


def _mode(config: RolloutCorrConfig) -> str:
    if config.mode is Mode.DECOUPLED:
        return (
            "Decoupled mode: r = pi_train / mu compares the trainer's own log-probs from before the update with the "
            "engine's."
        )
    loss = "PPO's clipped loss" if config.loss is Loss.PPO_CLIP else "REINFORCE without clipping"
    return (
        "Bypass mode: r = pi_train / mu compares the policy that is being updated with the engine's, at every "
        f"micro-batch; the loss is {loss}."
    )


def _weights(weights: Weights) -> str:
    said = f"Weighs each token by {_ratio(weights.level)}"
    lower, upper = weights.bounds.lower, weights.bounds.upper
    if weights.outside is Outside.MASK and band(weights.bounds):
        said += f", and by 0 where that is not {band(weights.bounds)}"
    else:
        said += "" if upper is None else f", cut at {upper:g}"
        said += "" if lower is None else f", raised to {lower:g}"
    if weights.normalize is not None:
        said += ", divided by the mean over the batch"
    return said + "."


def _ratio(level: Level) -> str:
    return "its r" if level is Level.TOKEN else f"the {LEVELS[level].formula}"


def _criterion(criterion: Criterion) -> str:
    condition = f" if {_CONDITIONS[criterion.when]}" if criterion.when is not None else ""
    if criterion.scope is Scope.BATCH:
        return (
            f"Rejects the tokens of the batch with the largest {criterion.stat}{condition} until the mean of the rest "
            f"is {band(criterion.bounds)}."
        )
    noun = NOUNS[criterion.scope]
    return f"Rejects a {noun} unless {_value(criterion, noun)} is {band(criterion.bounds)}{_only(condition)}."


def _only(condition: str) -> str:
    return f"; only{condition}" if condition else ""


def _value(criterion: Criterion, noun: str) -> str:
    of_ratio = criterion.stat is Stat.K1
    what = "r" if of_ratio else str(criterion.stat)
    if criterion.agg is None:
        return f"its {what}"
    if criterion.agg is Agg.SUM:
        return f"the product of r over the {noun}" if of_ratio else f"the sum of its {what}"
    if criterion.agg is Agg.MEAN:
        return f"the geometric mean of r over the {noun}" if of_ratio else f"the mean of its {what}"
    return "every r in it" if of_ratio else f"the largest {what} in it"
