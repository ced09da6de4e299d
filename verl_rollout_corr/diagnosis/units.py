"""The detector of numbers that are not the natural log-prob of one token: probabilities, another base, sums."""

from __future__ import annotations

import math

import numpy as np

from verl_rollout_corr.diagnosis.explained import Explained, finding, not_found, share_of
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
            part = _of_some_rows(view, values, other)
            if part is not None:
                tokens, said, numbers = part
                said = f"in {numbers['rows']:.0f} of {len(np.unique(view.row))} rows the {side}'s numbers {said}"
                return Explained(finding("units", share_of(view, tokens), 0.95, (said,), numbers), tokens)
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
    above = values[values > SLACK]
    if len(np.unique(above)) < 0.5 * len(above):  # a stand-in above 0
        return None
    return (
        f"are above 0 for {len(above) / len(values):.0%} of the tokens and differ from token to token, up to "
        f"{above.max():.3g}: they are no logarithms of probabilities, but may be logits before the softmax"
    ), {}


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(a, b)[0, 1]) if a.std() > 0 and b.std() > 0 else 0.0


def _of_some_rows(view: View, values: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, str, dict[str, float]] | None:
    """The tokens of rows whose numbers are another function of the other side's, while the other rows agree: one of
    several engines, or one path of an agent loop.
    """
    ours, theirs = grid_of(view, values), grid_of(view, other)
    clear = (theirs < -0.5) & (theirs > -100) & np.isfinite(ours)
    rows = np.flatnonzero(clear.sum(axis=1) >= 8)
    if len(rows) < 8:
        return None
    ours, theirs = (np.where(clear[rows], part[rows], np.nan) for part in (ours, theirs))
    least, count = max(3, 0.03 * len(rows)), len(rows)
    as_probability = np.nanmedian(np.abs(np.log(ours.clip(min=1e-30)) - theirs), axis=1) < _CLOSE
    if as_probability.sum() >= least:
        tokens = np.isin(view.row, rows[as_probability]) | (values > SLACK)
        said = "are probabilities: their logarithms agree with the other side"
        return tokens, said, {"rows": float(as_probability.sum())}
    factor = np.nanmedian(ours / theirs, axis=1)
    rest = np.nanmedian(np.abs(ours - factor[:, None] * theirs), axis=1)
    alike = np.abs(factor - 1) < 0.05
    for base, expected in BASES.items():
        fits = (np.abs(factor / expected - 1) < 0.03) & (rest < _CLOSE * np.nanmedian(np.abs(ours - theirs), axis=1))
        if fits.sum() >= least and (fits | alike).sum() > 0.8 * count:
            tokens = ~np.isin(view.row, rows[alike])  # short rows too, which are either
            k = float(np.median(factor[fits]))
            said = f"are logarithms to base {base}: {k:.4f} times those of the other side"
            return tokens, said, {"rows": float(fits.sum()), "factor": k}
    return None


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
