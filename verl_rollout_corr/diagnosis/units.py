"""The detector of numbers that are not the natural log-prob of one token: probabilities, another base, sums."""

from __future__ import annotations

import math

import numpy as np

from verl_rollout_corr.diagnosis.explained import Explained, finding, not_found
from verl_rollout_corr.diagnosis.misplaced import grid_of
from verl_rollout_corr.diagnosis.rows import SLACK
from verl_rollout_corr.diagnosis.view import View, typical

BASES = {"2": 1 / math.log(2), "10": 1 / math.log(10)}
"""The factor between a logarithm to another base and the natural one."""
_SAME = 0.9  # a correlation that shows that two columns are the same numbers
_CLOSE = 0.2  # what a factor leaves of the size of l, at most
_LEAST = 50


Told = tuple[str, dict[str, float]]
"""What the numbers are, in words, and values for programs."""


def other_units(view: View) -> Explained:
    """Log-probs of one side that are another function of the tokens' probabilities. Explains every token."""
    nothing = np.zeros(len(view), bool)
    if len(view) >= _LEAST:
        for side, values, other in (("engine", view.rollout, view.train), ("trainer", view.train, view.rollout)):
            told = _of_one_side(view, values, other)
            if told is not None:
                return Explained(finding("units", 1.0, 0.97, (f"the {side}'s numbers {told[0]}",), told[1]), ~nothing)
    said = "both sides have one negative number per token, and neither is a multiple of the other"
    return Explained(None, nothing, (not_found("units", said),))


def _of_one_side(view: View, values: np.ndarray, other: np.ndarray) -> Told | None:
    good = np.isfinite(values) & (other <= SLACK) & (other > -100)
    if good.sum() < max(_LEAST, 0.5 * len(view)):
        return None
    if float((values[good] > SLACK).mean()) > 0.3:
        return _positive(values[good], other[good])
    return _summed(view, values, other) or _scaled(values[good], other[good])


def _positive(values: np.ndarray, other: np.ndarray) -> Told | None:
    if (values >= 0).mean() > 0.99 and (values <= 1 + SLACK).mean() > 0.99:
        alike = _correlation(np.log(values.clip(min=1e-30)), other)
        if alike > _SAME:
            return f"are probabilities: their logarithms correlate by {alike:.3f} with the other side", {}
    alike = _correlation(-values, other)
    if (values >= -SLACK).mean() > 0.99 and alike > _SAME:
        return f"have the wrong sign: with the sign turned they correlate by {alike:.3f} with the other side", {}
    return None


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(a, b)[0, 1]) if a.std() > 0 and b.std() > 0 else 0.0


def _scaled(values: np.ndarray, other: np.ndarray) -> Told | None:
    """A factor k without a constant. A temperature renormalises: its constant differs from context to context."""
    clear = other < -0.5
    if clear.sum() < _LEAST:
        return None
    k = float(np.median(values[clear] / other[clear]))
    if not 0.2 < k < 5 or abs(k - 1) < 0.1:
        return None
    size, rest = np.abs(values - other), np.abs(values - k * other)
    if np.median(rest[clear]) > _CLOSE * np.median(size[clear]) or typical(rest) > _CLOSE * typical(size):
        return None
    # Where all contexts are alike a temperature's constant is nearly the same in each. Then the slope differs from k.
    slope = float(np.polyfit(other[clear], values[clear], 1)[0])
    if abs(slope / k - 1) > 0.04:
        return None
    for base, factor in BASES.items():
        if abs(k / factor - 1) < 0.02:
            return f"are logarithms to base {base}: {k:.4f} times those of the other side", {"factor": k}
    said = (
        f"are {k:.3f} times those of the other side, without a constant: they were multiplied after the softmax (a "
        "temperature before it would renormalise)"
    )
    return said, {"factor": k}


def _summed(view: View, values: np.ndarray, other: np.ndarray) -> Told | None:
    """Sums up to each token, or one sum or mean of the response at each of its tokens."""
    ours, theirs = grid_of(view, values), grid_of(view, other)
    counts = np.isfinite(theirs).sum(axis=1)
    long = np.flatnonzero(counts >= 8)
    if len(long) < 4:
        return None
    ours, theirs, counts = ours[long], theirs[long], counts[long]
    with np.errstate(invalid="ignore"):
        steps = np.diff(ours, axis=1)
    inside = np.isfinite(steps) & np.isfinite(theirs[:, 1:])
    if not inside.any():
        return None
    if (steps[inside] <= SLACK).mean() > 0.99 and (steps[inside] < 0).mean() > 0.3:
        alike = _correlation(steps[inside], theirs[:, 1:][inside])
        if alike > _SAME:
            return f"are sums up to each token: their differences correlate by {alike:.3f} with the other side", {}
    if (np.abs(steps[inside]) <= 1e-6 * np.abs(ours[:, 1:][inside])).mean() < 0.99:
        return None
    first, total = ours[:, 0], np.nansum(theirs, axis=1)
    for what, expected in (("sum", total), ("mean", total / counts)):
        if np.median(np.abs(first / expected - 1)) < 0.1 and _correlation(first, expected) > _SAME:
            return f"are the same at each token of a response: the {what} of its log-probs", {}
    return None
