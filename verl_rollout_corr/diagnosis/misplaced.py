"""Detectors of log-probs that belong to the neighbouring token, or to another row."""

from __future__ import annotations

import numpy as np

from verl_rollout_corr.diagnosis.explained import Explained, finding, not_found, share_of
from verl_rollout_corr.diagnosis.view import View

SHIFTS = tuple(shift for shift in range(-8, 9) if shift)
"""The largest shift between the two sides that is looked for, in tokens."""
_UNLIKE, _ALIKE, _LIKE = 0.5, 0.75, 0.95  # rank correlations of a row: with another's, with its own, and for certain
_BETTER = 0.1  # log-probs of another row correlate by so much more with that row than with their own
_MOST_ROWS, _MOST_WIDTH = 400, 256  # rows that are compared with others, and how many tokens of each


def misplaced(view: View) -> list[Explained]:
    """Rows whose log-probs belong to the neighbouring token, or to another row.

    The measure is the rank correlation along a row, because a sampler or a temperature on one side keeps the order of
    log-probs, but changes distances so much that a shift would not show in them.
    """
    if not len(view):
        return []
    train, rollout = _ranks(grid_of(view, view.train)), _ranks(grid_of(view, view.rollout))
    own = _correlation(train, rollout)
    moved = {shift: _moved_correlation(train, rollout, shift) for shift in SHIFTS}
    best = np.nanmax([np.full(len(own), -1.0), *moved.values()], axis=0)
    off = own < _UNLIKE
    shifted = (best > _ALIKE) & (best > own + _BETTER)
    rows = max(int(np.isfinite(own).sum()), 1)
    closest = _closest(view, train, rollout, (own < _LIKE) & ~shifted)
    swapped = (closest > _ALIKE) & (closest > own + _BETTER)
    least = max(2, 0.01 * rows)
    # Of unrelated rows some resemble another by chance.
    is_shifted = shifted.sum() >= least
    is_swapped = swapped.sum() >= max(least, 0.5 * (off & ~shifted).sum())
    # If one of the two is found, rows that fit neither, or are too short to tell, are not evidence of another cause.
    unclear = (off | ~np.isfinite(own)) & ~shifted & ~swapped
    # A row that got the log-probs of a similar one, or of a shorter one, still resembles itself.
    doubtful = (own < _LIKE) & ~swapped
    if is_swapped and doubtful.sum() < 0.3 * (own >= _LIKE).sum():
        unclear |= doubtful & ~shifted if is_shifted else doubtful
    if shifted.sum() > 0.8 * rows:
        unclear, is_swapped = ~shifted, False
    return [
        _shift(view, moved, own, shifted, unclear)
        if is_shifted
        else _nothing(view, "shift", "moved by up to eight tokens"),
        _permutation(view, swapped, unclear) if is_swapped else _nothing(view, "permuted", "against another row"),
    ]


def _nothing(view: View, cause: str, how: str) -> Explained:
    return Explained(None, np.zeros(len(view), bool), (not_found(cause, f"no row fits better {how}"),))


def _shift(
    view: View, moved: dict[int, np.ndarray], own: np.ndarray, shifted: np.ndarray, unclear: np.ndarray
) -> Explained:
    best = np.nanmax([np.full(len(own), -1.0), *moved.values()], axis=0)
    shift = max(SHIFTS, key=lambda s: int((moved[s][shifted] == best[shifted]).sum()))
    tokens = (shifted | unclear)[view.row]
    said = (
        f"{shifted.sum()} of {len(own)} rows fit when the engine's log-probs are moved by {-shift:+d}: the rank "
        f"correlation along a row rises from {np.median(own[shifted]):.2f} to {np.median(best[shifted]):.2f}"
    )
    return Explained(finding("shift", share_of(view, tokens), 1.0, (said,), {"shift": -shift}), tokens)


def _permutation(view: View, swapped: np.ndarray, unclear: np.ndarray) -> Explained:
    tokens = (swapped | unclear)[view.row]
    said = f"{swapped.sum()} of {len(swapped)} rows have the log-probs of another row of their step"
    values = {"fraction": float(swapped.mean())}
    return Explained(finding("permuted", share_of(view, tokens), 1.0, (said,), values), tokens)


def _ranks(grid: np.ndarray) -> np.ndarray:
    """The rank of each value within its row. Equal values get the same rank; NaN stays NaN."""
    result = np.full(grid.shape, np.nan)
    for row, values in enumerate(grid):
        inside = ~np.isnan(values)
        _, inverse, counts = np.unique(values[inside], return_inverse=True, return_counts=True)
        result[row, inside] = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return result


def _correlation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(rows,) of each row of a with the same row of b, where both have a value; NaN for fewer than eight, or none."""
    both = ~(np.isnan(a) | np.isnan(b))
    count = both.sum(axis=1)
    x, y = np.where(both, a, 0.0), np.where(both, b, 0.0)
    return _pearson(count, x.sum(1), y.sum(1), (x * x).sum(1), (y * y).sum(1), (x * y).sum(1), least=8)


def _between(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(rows of a, rows of b) the same between any two rows; NaN for fewer than twelve values."""
    in_a, in_b = (~np.isnan(a)).astype(float), (~np.isnan(b)).astype(float)
    x, y = np.nan_to_num(a), np.nan_to_num(b)
    sums = (in_a @ in_b.T, x @ in_b.T, in_a @ y.T, (x * x) @ in_b.T, in_a @ (y * y).T, x @ y.T)
    return _pearson(*sums, least=12)


def _pearson(
    n: np.ndarray, x: np.ndarray, y: np.ndarray, xx: np.ndarray, yy: np.ndarray, xy: np.ndarray, *, least: int
) -> np.ndarray:
    n = np.maximum(n, 1)
    spread = (xx / n - (x / n) ** 2) * (yy / n - (y / n) ** 2)
    told = (n >= least) & (spread > 1e-9)
    return np.where(told, (xy / n - x * y / n**2) / np.sqrt(np.where(told, spread, 1.0)), np.nan)


def _moved_correlation(train: np.ndarray, rollout: np.ndarray, shift: int) -> np.ndarray:
    """(rows,) the correlation if the engine's ranks are moved; NaN for short rows, which a far shift fits by chance."""
    width = train.shape[1]
    if abs(shift) >= width:
        return np.full(len(train), np.nan)
    found = _correlation(train, _moved(rollout, shift))
    if abs(shift) > 2:
        found[(~np.isnan(train)).sum(axis=1) < 24] = np.nan
    return found


def _moved(values: np.ndarray, shift: int) -> np.ndarray:
    """values[:, t + shift], NaN where there is none."""
    result = np.full_like(values, np.nan)
    if shift > 0:
        result[:, :-shift] = values[:, shift:]
    else:
        result[:, -shift:] = values[:, :shift]
    return result


def _closest(view: View, train: np.ndarray, rollout: np.ndarray, off: np.ndarray) -> np.ndarray:
    """(rows,) how well the engine's log-probs of each row of `off` fit another row of its step; -1 elsewhere. A
    row that begins like its neighbour also correlates with its own tokens, in part.
    """
    result = np.full(len(off), -1.0)
    steps = view.sample.batch.step
    for step in np.unique(steps[off]):
        rows, candidates = np.flatnonzero(off & (steps == step))[:_MOST_ROWS], np.flatnonzero(steps == step)
        found = _between(rollout[rows][:, :_MOST_WIDTH], train[candidates[: 4 * _MOST_ROWS]][:, :_MOST_WIDTH])
        found[rows[:, None] == candidates[None, : 4 * _MOST_ROWS]] = np.nan
        result[rows] = np.nan_to_num(found, nan=-1.0).max(axis=1, initial=-1.0)
    return result


def grid_of(view: View, values: np.ndarray) -> np.ndarray:
    """(rows, longest): the values of each row's response tokens without gaps, then NaN."""
    counts = np.bincount(view.row, minlength=len(view.sample.batch))
    inside = np.arange(counts.max())[None, :] < counts[:, None]
    grid = np.full(inside.shape, np.nan)
    grid[inside] = values
    return grid
