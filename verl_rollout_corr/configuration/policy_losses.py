"""verl's policy losses that would be wrong with some masks or weights in decoupled mode, and why
(docs/policy-losses.md).
"""

from __future__ import annotations

from collections.abc import Callable

from verl_rollout_corr.grammar import Denominator, Invalid, Outside, RolloutCorrConfig, Scope

BYPASS_LOSS_MODE = "rollout_corr"
"""The name under which the hook registers its policy loss with verl."""


def policy_loss_objection(loss_mode: str, config: RolloutCorrConfig) -> str | None:
    """Why this policy loss of verl would be wrong with `config` in decoupled mode, or None where it is right."""
    rule = _POLICY_LOSSES.get(loss_mode)
    return rule(config) if rule else None


def _diluted(config: RolloutCorrConfig, mean: str, *otherwise: str) -> str | None:
    """The objection to a mean over the response mask if a criterion can reject some tokens of a sequence and keep
    others. `otherwise` is what else one can write.
    """
    part = next((criterion.name for criterion in config.reject if criterion.scope is not Scope.SEQ), None)
    write = ", ".join(["criteria of whole sequences (seq_<agg>_<stat>)", *otherwise])
    return part and (
        f"its {mean} over the response mask, which the tokens rejected by rollout_corr.reject.{part} would dilute. "
        f"Write {write}, or another loss_mode."
    )


def _gspo(config: RolloutCorrConfig) -> str | None:
    if config.denominator is Denominator.KEPT:
        return None
    return _diluted(config, "sequence ratio is a mean", "rollout_corr.denominator: kept")


def _geo_mean(config: RolloutCorrConfig) -> str | None:
    diluted = _diluted(config, "geometric mean of ratios and weights runs")
    if diluted is not None:
        return diluted
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


# A policy loss that is not listed is right with every mask and every weight.
_POLICY_LOSSES: dict[str, Callable[[RolloutCorrConfig], str | None]] = {
    "gspo": _gspo,
    "geo_mean": _geo_mean,
    "clip_cov": _covariance,
    "kl_cov": _covariance,
    "bypass_mode": lambda _: "it is verl's own correction. Leave it out and write rollout_corr.mode: bypass.",
    BYPASS_LOSS_MODE: lambda _: "it is the loss of bypass mode. Leave it out, or write rollout_corr.mode: bypass.",
}
