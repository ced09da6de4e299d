"""The detector of log-probs that are not those of the sampled token, from rows that share their first tokens."""

from __future__ import annotations

import numpy as np

from verl_rollout_corr.diagnosis.explained import Explained, finding, not_found
from verl_rollout_corr.diagnosis.view import View

_LEAST = 8  # contexts with at least two different tokens
_TOO_MUCH = 1.1


def other_token(view: View) -> Explained:
    """Different tokens that were sampled in one context have together a probability of at most 1 on each side.

    An engine that returns the log-prob of its likeliest token, or of the token before a filter, breaks that: it gives
    every token of a context the same number. Explains every token.
    """
    nothing = np.zeros(len(view), bool)
    context, ids = view.context, view.ids
    if context is None or ids is None or not (context >= 0).any():
        return Explained(None, nothing, (not_found("other_token", "no two rows share a context"),))
    pairs = np.stack([context, ids])
    _, once = np.unique(pairs, axis=1, return_index=True)
    once = once[context[once] >= 0]
    _, inverse, counts = np.unique(context[once], return_inverse=True, return_counts=True)
    several = counts >= 2
    said = f"{int(several.sum())} contexts have several tokens"
    if several.sum() < _LEAST:
        return Explained(None, nothing, (not_found("other_token", f"{said}: too few to tell"),))
    for side, values, other in (("engine", view.rollout, view.train), ("trainer", view.train, view.rollout)):
        total = np.bincount(inverse, np.exp(values[once].clip(max=0.0)))[several]
        theirs = np.bincount(inverse, np.exp(other[once].clip(max=0.0)))[several]
        above = float((total > _TOO_MUCH).mean())
        spread = _spread(values[once], inverse, counts)
        if above > 0.2 and spread < 0.01 and (theirs > _TOO_MUCH).mean() < 0.25 * above:
            evidence = (
                f"in {above:.0%} of {int(several.sum())} contexts the {side}'s probabilities of the different tokens "
                "that were sampled add up to more than 1, since each has the same log-prob",
            )
            return Explained(finding("other_token", 1.0, 0.97, evidence, {"fraction": above}), ~nothing)
        if spread < 1e-3 < 0.2 < _spread(other[once], inverse, counts):
            evidence = (
                f"in {int(several.sum())} contexts the different tokens that were sampled have the same number of the "
                f"{side}, and the other side's differ: it is a number of the context, such as another token's "
                "log-prob or the entropy",
            )
            return Explained(finding("other_token", 1.0, 0.97, evidence, {"fraction": 1.0}), ~nothing)
    said = f"{said}; their probabilities add up to at most 1 on both sides"
    return Explained(None, nothing, (not_found("other_token", said),))


def _spread(values: np.ndarray, inverse: np.ndarray, counts: np.ndarray) -> float:
    """The typical difference of a token's value from the mean of its context."""
    mean = np.bincount(inverse, values) / counts
    return float(np.median(np.abs(values - mean[inverse])[counts[inverse] >= 2]))
