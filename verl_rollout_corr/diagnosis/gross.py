"""Detectors of what is broken outright: log-probs that are missing, misplaced or of another model.

Each gives a finding and the tokens it explains, which later detectors do not see.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl_rollout_corr.diagnosis.causes import CAUSES
from verl_rollout_corr.diagnosis.records import Checked, Finding
from verl_rollout_corr.diagnosis.view import View

FAR = 0.5
"""A log-ratio beyond this is no rounding."""
LEAST = 5
"""So many tokens at least make a pattern."""
SHIFTS = (-2, -1, 1, 2)
"""By how many tokens one side may be moved."""
_CLOSER = 0.35  # a neighbour's log-prob has to be so much closer than the token's own
_MOST_ROWS = 400  # rows that are compared with each other


@dataclass(frozen=True)
class Explained:
    """A finding and the tokens (N,) bool that it explains; or what speaks against the cause."""

    finding: Finding | None
    tokens: np.ndarray
    checked: tuple[Checked, ...] = ()


def finding(
    cause: str, share: float, confidence: float, evidence: tuple[str, ...], values: dict[str, float] | None = None
) -> Finding:
    """A finding with the title and the advice of its cause."""
    row = CAUSES[cause]
    bounded = float(np.clip(share, 0.0, 1.0)), float(np.clip(confidence, 0.0, 1.0))
    return Finding(cause, row.title, *bounded, evidence, row.change, values or {})


def not_found(cause: str, evidence: str) -> Checked:
    """What speaks against a cause."""
    return Checked(cause, CAUSES[cause].title, evidence)


def _share(view: View, tokens: np.ndarray) -> float:
    return float((view.log_ratio[tokens] ** 2).sum() / view.energy) if view.energy else 0.0


def missing(view: View) -> list[Explained]:
    """Stand-ins, zeros and constants in place of log-probs, by where they stand: tails, blocks, rows, one id."""
    found: list[Explained] = []
    left = np.ones(len(view), bool)
    for side, values, other in (("engine", view.rollout, view.train), ("trainer", view.train, view.rollout)):
        bad = left & ~_possible(values, side)
        if bad.any():
            found.append(_stand_ins(view, bad, values, side))
            left &= ~bad
        value = _repeated(values, other, left)
        if value is None:
            continue
        # Where both sides are 0.0 the token is certain, or padding: not a missing value.
        tokens = left & (values == value) & ((other != value) if value else (other < -1e-3))
        found.append(_constant(view, tokens, left, value, side))
        left &= ~tokens
    return found


def _possible(values: np.ndarray, side: str) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        # log pi_train = -inf is legal: the trainer gives the token no probability.
        least = -np.inf if side == "trainer" else -100.0
        return (values >= least) & (values <= 1e-3)


def _stand_ins(view: View, bad: np.ndarray, values: np.ndarray, side: str) -> Explained:
    kinds, counts = np.unique(values[bad], return_counts=True)
    most = kinds[np.argmax(counts)]
    evidence = (f"{bad.sum()} of {len(view)} tokens ({bad.mean():.2%}) have {most:g} as the {side}'s log-prob, "
                f"in {len(np.unique(view.row[bad]))} rows",)  # fmt: skip
    return Explained(finding("sentinel", _share(view, bad), 1.0, evidence, {"fraction": float(bad.mean())}), bad)


def _repeated(values: np.ndarray, other: np.ndarray, left: np.ndarray) -> float | None:
    """The value that stands for log-probs: most of what is far from the other side is exactly it."""
    with np.errstate(invalid="ignore"):
        far = left & ~(np.abs(values - other) <= FAR)
    if far.sum() < LEAST:
        return None
    kinds, counts = np.unique(values[far], return_counts=True)
    most = int(np.argmax(counts))
    value, second = float(kinds[most]), int(np.sort(counts)[-2]) if len(counts) > 1 else 0
    stands_out = counts[most] >= 0.2 * far.sum() or counts[most] >= 5 * second
    if counts[most] < max(LEAST, 0.001 * left.sum()) or not stands_out:
        return None
    if value == 0.0:
        # An engine that keeps one token of a truncated distribution is certain of it, but of no unlikely one.
        zero = far & (values == 0.0)
        if (other[zero] < -2.5).mean() < 0.15:
            return None
    return value


def _constant(view: View, tokens: np.ndarray, left: np.ndarray, value: float, side: str) -> Explained:
    count, share = int(tokens.sum()), _share(view, tokens)
    said = f"{count} of {len(view)} tokens ({tokens.mean():.2%}) have {value:g} as the {side}'s log-prob"
    rows = view.row[tokens]
    per_row, total = np.bincount(rows, minlength=view.row.max() + 1), np.bincount(view.row)
    whole = (per_row == total) & (total >= 8)
    values = {"fraction": float(tokens.mean()), "value": value}

    def explained(cause: str, *more: str, **numbers: float) -> Explained:
        return Explained(finding(cause, share, 1.0, (said, *more), values | numbers), tokens)

    tail = _tail_start(view, tokens)
    if tail is not None:
        return explained(
            "truncated_tail", f"all of them from position {tail} on, to the end of their rows", position=tail
        )
    if per_row[whole].sum() > 0.8 * count:
        return explained("constant", f"{int(whole.sum())} whole rows of {len(total[total > 0])}")
    one = _one_id(view, tokens)
    if one is not None:
        where = "always at the end of its row" if view.last[tokens].mean() > 0.8 else "within rows"
        return explained("token", f"all of them of token id {one}, {where}", token=one)
    runs, expected = _run_length(view, tokens), 1 / max(1 - tokens.mean(), 1e-9)
    if runs >= max(2.5 * expected, 2.5):
        return explained("mask", f"in blocks of {runs:.1f} tokens on average, by chance they would be {expected:.1f}")
    return explained("zeros" if value == 0 else "constant", f"scattered over {len(np.unique(rows))} rows")


def _tail_start(view: View, tokens: np.ndarray) -> int | None:
    """The position from which on every token of every longer row is one of `tokens`, and none before it."""
    # Only tokens that are not certain can tell whether their log-prob is missing.
    clear = tokens | (np.minimum(view.train, view.rollout) < -0.05)
    counts = np.bincount(view.position[clear])
    missing_at = np.bincount(view.position[tokens], minlength=len(counts))
    present = np.flatnonzero(missing_at < 0.9 * counts)
    start = int(present.max()) + 1 if len(present) else 0
    behind = tokens & (view.position >= start)
    if start < 4 or behind.sum() < max(LEAST, 0.9 * tokens.sum()) or len(np.unique(view.row[behind])) < 2:
        return None
    return start


def _one_id(view: View, tokens: np.ndarray) -> int | None:
    if view.ids is None:
        return None
    kinds, counts = np.unique(view.ids[tokens], return_counts=True)
    most = kinds[np.argmax(counts)]
    of_id = view.ids == most
    return int(most) if counts.max() >= 0.9 * tokens.sum() and tokens[of_id].mean() > 0.5 else None


def _run_length(view: View, tokens: np.ndarray) -> float:
    """The mean length of runs of `tokens` within rows."""
    before = np.concatenate([[False], tokens[:-1] & (np.diff(view.row) == 0)])
    starts = (tokens & ~before).sum()
    return float(tokens.sum() / starts) if starts else 0.0


def padding_in_mask(view: View) -> Explained:
    """Masked-in positions of which both sides say exactly 0.0, to the end of rows: padding."""
    nothing = Explained(None, np.zeros(len(view), bool))
    if view.ids is None or not len(view):
        return nothing
    both = (view.rollout == 0.0) & (view.train == 0.0)
    # A token that is certain has 0.0 on both sides too; padding is what nothing else follows in its row.
    after = np.full(len(view.sample.batch), -1, np.int64)
    np.maximum.at(after, view.row[~both], view.position[~both])
    both &= view.position > after[view.row]
    if both.sum() < LEAST or _run_length(view, both) < 3:
        return nothing
    kinds, counts = np.unique(view.ids[both], return_counts=True)
    if counts.max() < 0.9 * both.sum():
        return nothing
    evidence = (
        f"{both.sum()} of {len(view)} tokens ({both.mean():.2%}) under the mask have log-prob 0.0 on both sides, in "
        f"blocks of {_run_length(view, both):.1f}, and are all of id {kinds[np.argmax(counts)]}",
    )
    return Explained(finding("mask", 0.0, 1.0, evidence, {"fraction": float(both.mean())}), both)


def _grid(view: View, values: np.ndarray) -> np.ndarray:
    """(rows, longest) of the response tokens, closed up; NaN behind each row."""
    counts = np.bincount(view.row, minlength=len(view.sample.batch))
    inside = np.arange(counts.max())[None, :] < counts[:, None]
    grid = np.full(inside.shape, np.nan)
    grid[inside] = values
    return grid


def _median(values: np.ndarray) -> np.ndarray:
    """Of each row; inf where it has fewer than six values."""
    enough = np.isfinite(values).sum(axis=1) >= 6
    result = np.full(len(values), np.inf)
    if enough.any():
        result[enough] = np.nanmedian(values[enough], axis=1)
    return result


def misplaced(view: View) -> list[Explained]:
    """Rows whose log-probs belong to the neighbouring token, or to another row."""
    nothing = np.zeros(len(view), bool)
    if not len(view):
        return []
    train, rollout = _grid(view, view.train), _grid(view, view.rollout)
    own = _median(np.abs(train - rollout))
    distances = {shift: _median(np.abs(train - _moved(rollout, shift))) for shift in SHIFTS}
    best = np.min(list(distances.values()), axis=0)
    off = np.isfinite(own) & (own > 0.1)
    shifted = off & (best < _CLOSER * own)
    least = max(2, 0.01 * np.isfinite(own).sum())
    swapped = _swapped(view, train, rollout, own, off & ~shifted)
    # With one of the two, what is far off and fits nowhere, or is too short to tell, is no evidence of anything else.
    unclear = (off | ~np.isfinite(own)) & ~shifted & ~swapped
    if shifted.sum() > 0.8 * np.isfinite(own).sum():
        unclear, swapped = ~shifted, swapped & False
    found: list[Explained] = []
    if shifted.sum() >= least:
        shift = max(SHIFTS, key=lambda s: int((distances[s][shifted] == best[shifted]).sum()))
        tokens = (shifted | unclear)[view.row]
        evidence = (
            f"{shifted.sum()} of {len(own)} rows fit when the engine's log-probs are moved by {-shift:+d}: the median "
            f"of |l| falls from {np.median(own[shifted]):.3g} to {np.median(best[shifted]):.3g}",
        )
        found.append(Explained(finding("shift", _share(view, tokens), 1.0, evidence, {"shift": -shift}), tokens))
    else:
        found.append(Explained(None, nothing, (not_found("shift", "no row fits better when moved by one or two"),)))
    # Of unrelated rows some resemble another by chance.
    if swapped.sum() >= max(least, 0.5 * (off & ~shifted).sum()):
        tokens = (swapped | unclear)[view.row]
        evidence = (f"{swapped.sum()} of {len(own)} rows have the log-probs of another row of their step",)
        share = float(swapped.mean())
        found.append(Explained(finding("permuted", _share(view, tokens), 1.0, evidence, {"fraction": share}), tokens))
    else:
        found.append(Explained(None, nothing, (not_found("permuted", "no row has the log-probs of another one"),)))
    return found


def _moved(values: np.ndarray, shift: int) -> np.ndarray:
    """values[:, t + shift], NaN where there is none."""
    result = np.full_like(values, np.nan)
    if shift > 0:
        result[:, :-shift] = values[:, shift:]
    else:
        result[:, -shift:] = values[:, :shift]
    return result


def _swapped(view: View, train: np.ndarray, rollout: np.ndarray, own: np.ndarray, off: np.ndarray) -> np.ndarray:
    """(rows,) bool: rows whose engine's log-probs are far from their own tokens and close to those of another row of
    the step.
    """
    result = np.zeros(len(own), bool)
    steps = view.sample.batch.step
    for row in np.flatnonzero(off)[:_MOST_ROWS]:
        same = np.flatnonzero((steps == steps[row]) & (np.arange(len(own)) != row))[:_MOST_ROWS]
        gaps = _median(np.abs(rollout[row][None, :128] - train[same][:, :128]))
        result[row] = gaps.min(initial=np.inf) < _CLOSER * own[row]
    return result


def unrelated(view: View, total: int) -> Explained:
    """Whether the two sides are hardly correlated: other weights. `total`: tokens before anything was explained."""
    nothing = np.zeros(len(view), bool)
    if len(view) < max(50, 0.3 * total):
        return Explained(None, nothing)
    spread = view.train.var() + view.rollout.var()
    correlation = float(np.corrcoef(view.train, view.rollout)[0, 1]) if spread > 0 else 1.0
    rms = float(np.sqrt((view.log_ratio**2).mean()))
    evidence = f"the log-probs correlate by {correlation:.3f}, l is {rms:.3g} in the root mean square"
    if correlation < 0.6 and rms > 0.1 and (view.log_ratio**2).mean() > 0.5 * spread:
        everything = np.ones(len(view), bool)
        return Explained(finding("not_loaded", 1.0, 0.95, (evidence,), {"correlation": correlation}), everything)
    return Explained(None, nothing, (not_found("not_loaded", evidence),))
