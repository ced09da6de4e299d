"""The detector of two sides that see another prompt before the response: the mismatch fades as the response, which both
see, grows.
"""

from __future__ import annotations

import numpy as np

from verl_rollout_corr.diagnosis.explained import Explained, finding, not_found, share_of
from verl_rollout_corr.diagnosis.precision import BF16
from verl_rollout_corr.diagnosis.sampler import split
from verl_rollout_corr.diagnosis.view import View, median_by

_PARTS, _FADES, _LEAST = 6, 1.8, 40  # parts of the positions, how much larger |l| is in the first, tokens of each part
_STEP = 1.15  # from part to part |l| may grow by chance by so much
_ROWS = 20


def other_prompt(view: View) -> Explained:
    """Whether |l| fades with the position, compared with tokens that the engine finds as likely; in all rows, or in
    those that differ most.
    """
    nothing = np.zeros(len(view), bool)
    size = np.abs(view.log_ratio)
    for tokens, where in ((~nothing, ""), *_apart(view, size)):
        faded = _fading(view.where(tokens))
        if faded is None:
            continue
        times, first, last = faded
        said = (
            f"{where}the typical |l| fades from {first:.2g} at the beginning of responses to {last:.2g} at their end "
            f"({times:.2g} times, compared with tokens as likely): what both sides see alike grows"
        )
        values = {"times": times, "fraction": float(tokens.mean())}
        return Explained(finding("prompt", share_of(view, tokens), 0.8, (said,), values), tokens)
    return Explained(None, nothing, (not_found("prompt", "|l| does not fade from the beginning of responses on"),))


def _apart(view: View, size: np.ndarray) -> list[tuple[np.ndarray, str]]:
    """The tokens of rows that differ far more than the others, if there are such rows."""
    counts = np.bincount(view.row)
    rows = np.flatnonzero(counts >= 8)
    if len(rows) < _ROWS:
        return []
    typical = np.log(np.bincount(view.row, size)[rows] / counts[rows] + 1e-12)
    ordered = np.sort(typical)
    place, gap = split(ordered)
    apart = rows[typical > ordered[place]]
    if gap < 1.2 or not 5 <= len(apart) < 0.9 * len(rows):
        return []
    return [(np.isin(view.row, apart), f"in {len(apart)} of {len(rows)} rows ")]


def _fading(view: View) -> tuple[float, float, float] | None:
    """How many times larger |l| is in the first part of the positions than in the last, and both; None if it is not."""
    uncertain = view.rollout < -0.1
    if uncertain.sum() < _PARTS * _LEAST:
        return None
    size, position, likely = (values[uncertain] for values in (np.abs(view.log_ratio), view.position, view.rollout))
    edges = np.unique(np.quantile(position, np.linspace(0, 1, _PARTS + 1)[1:-1]))
    if len(edges) < _PARTS - 1 or edges[0] < 2:
        return None
    part = np.searchsorted(edges, position, side="right")
    if np.bincount(part, minlength=_PARTS).min() < _LEAST / 2:
        return None
    bins = np.searchsorted(np.quantile(likely, [0.2, 0.4, 0.6, 0.8]), likely)
    relative = size / np.maximum(median_by(size, bins), 1e-12)
    sizes = np.array([np.median(relative[part == at]) for at in range(_PARTS)])
    first, last = (float(np.median(size[part == at])) for at in (0, _PARTS - 1))
    times = float(sizes[0] / max(sizes[-1], 1e-12))
    steady = (sizes[1:] <= _STEP * sizes[:-1]).all() and sizes[1] > 1.2 * sizes[-1]
    return (times, first, last) if times >= _FADES and steady and first > 2 * BF16 else None
