"""The detector of rows whose two sides fit token by token only after a part of them is moved: text that was decoded and
encoded again, or a list without entries for tool tokens.
"""

from __future__ import annotations

import numpy as np

from verl_rollout_corr.diagnosis.explained import FAR, Explained, finding, not_found, share_of
from verl_rollout_corr.diagnosis.misplaced import grid_of
from verl_rollout_corr.diagnosis.view import View

FARTHEST = 32
"""The largest shift of a part that is looked for, in tokens."""
_NET, _MOST_ROWS = 7.0, 400  # tokens of a part that fit only when it is moved, minus half of those that do not fit


def partly_moved(view: View) -> Explained:
    """Rows of which a part fits only when it is moved. Only likely and unlikely tokens in turn can tell: a token that
    is certain fits everywhere.
    """
    nothing = np.zeros(len(view), bool)
    far = (np.abs(view.log_ratio) > FAR) & (np.minimum(view.train, view.rollout) < -0.1)
    counts = np.bincount(view.row[far], minlength=len(view.sample.batch))
    rows = np.flatnonzero(counts >= 6)[:_MOST_ROWS]
    if not len(rows):
        return Explained(None, nothing, (not_found("shift", "no row has many tokens that differ much"),))
    train, rollout = grid_of(view, view.train)[rows], grid_of(view, view.rollout)[rows]
    best, shift, start = _best_parts(train, rollout)
    moved = best >= _NET
    said = f"no part of the {len(rows)} rows that differ most fits better when it is moved"
    if moved.sum() < 2 or moved.sum() < 0.01 * len(view.sample.batch):
        return Explained(None, nothing, (not_found("shift", said),))
    # If many of the rows that differ much are moved, the others are too short to tell, and not another cause.
    chosen = rows if moved.sum() > 0.25 * len(rows) else rows[moved]
    tokens = np.isin(view.row, chosen)
    kinds, found = np.unique(-shift[moved], return_counts=True)
    common = ", ".join(f"{kinds[at]:+d}" for at in np.argsort(-found)[:3])
    evidence = (
        f"{moved.sum()} rows fit, token by token, only when a part of the engine's log-probs is moved (by {common}), "
        f"from position {int(np.median(start[moved]))} on in the median",
        "text that was decoded and encoded again has other tokens from some place on; a list without entries for tool "
        "tokens moves at each of them",
    )
    values = {"shift": float(kinds[np.argmax(found)]), "rows": float(moved.sum())}
    return Explained(finding("shift", share_of(view, tokens), 0.95, evidence, values), tokens)


def _best_parts(train: np.ndarray, rollout: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each row the score, the shift and the start of the part that fits best when it is moved."""
    near = 0.03 + 0.05 * np.abs(train)
    clear = np.minimum(train, rollout) < -0.1
    with np.errstate(invalid="ignore"):
        own = np.abs(train - rollout) < near
    best, shift, start = np.zeros(len(train)), np.zeros(len(train), np.int64), np.zeros(len(train), np.int64)
    width = train.shape[1]
    for by in range(-min(FARTHEST, width - 8), min(FARTHEST, width - 8) + 1):
        if by == 0:
            continue
        moved = np.full_like(rollout, np.nan)
        if by > 0:
            moved[:, :-by] = rollout[:, by:]
        else:
            moved[:, -by:] = rollout[:, :by]
        with np.errstate(invalid="ignore"):
            fits = (np.abs(train - moved) < near) & (train < -0.1)
        score = np.where(fits & ~own, 1.0, np.where(clear & ~fits & np.isfinite(train), -0.5, 0.0))
        total = np.cumsum(score, axis=1)
        before = np.minimum.accumulate(np.concatenate([np.zeros((len(train), 1)), total[:, :-1]], axis=1), axis=1)
        gain = total - before
        end = gain.argmax(axis=1)
        found = gain[np.arange(len(train)), end]
        better = found > best
        best[better], shift[better] = found[better], by
        for row in np.flatnonzero(better):
            start[row] = int(np.argmin(np.concatenate([[0.0], total[row, : end[row]]])))
    return best, shift, start
