"""Detectors of what is broken outright: log-probs that are missing, misplaced or of another model.

Each returns a finding and the tokens that it explains, which are kept from later detectors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl_rollout_corr.diagnosis.causes import CAUSES
from verl_rollout_corr.diagnosis.records import Checked, Finding
from verl_rollout_corr.diagnosis.view import MISSING, View

FAR = 0.5
"""A log-ratio larger than this is not rounding."""
LEAST = 5
"""The least number of tokens that counts as a pattern."""
SHIFTS = (-2, -1, 1, 2)
"""The largest shift between the two sides that is looked for, in tokens."""
_UNLIKE, _ALIKE, _LIKE = 0.5, 0.75, 0.95  # rank correlations of a row: with another's, with its own, and for certain
_BETTER = 0.1  # log-probs of another row correlate by so much more with that row than with their own
_MOST_ROWS, _MOST_WIDTH = 400, 256  # rows that are compared with others, and how many tokens of each


@dataclass(frozen=True)
class Explained:
    """A finding and the tokens (N,) bool that it explains; or the evidence against the cause."""

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
    """The evidence against a cause."""
    return Checked(cause, CAUSES[cause].title, evidence)


def _share(view: View, tokens: np.ndarray) -> float:
    return float((view.log_ratio[tokens] ** 2).sum() / view.energy) if view.energy else 0.0


def missing(view: View) -> list[Explained]:
    """Placeholders, zeros and constants instead of log-probs, told apart by place: tails, blocks, rows, one id."""
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
    """The placeholder value: most log-probs that are far from the other side's are exactly equal to it."""
    with np.errstate(invalid="ignore"):
        far = left & ~(np.abs(values - other) <= FAR)
    if far.sum() < LEAST:
        return None
    # Rows that share a context have equal log-probs for its tokens, on both sides, which count as one observation.
    once = np.unique(np.stack([values[far], other[far]]), axis=1)[0]
    kinds, counts = np.unique(once, return_counts=True)
    most = int(np.argmax(counts))
    value, second = float(kinds[most]), int(np.sort(counts)[-2]) if len(counts) > 1 else 0
    stands_out = counts[most] >= 0.2 * len(once) or counts[most] >= 5 * second
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
    """The position from which on every token of every longer row is in `tokens`; no earlier token is."""
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
    """Response positions at the end of rows where both sides are exactly 0.0: padding under the mask."""
    nothing = Explained(None, np.zeros(len(view), bool))
    if view.ids is None or not len(view):
        return nothing
    both = (view.rollout == 0.0) & (view.train == 0.0)
    # A token that is certain has 0.0 on both sides too; padding is what nothing else follows in its row.
    after = np.full(len(view.sample.batch), -1, np.int64)
    np.maximum.at(after, view.row[~both], view.position[~both])
    both &= view.position > after[view.row]
    # One or two rows that end in a loop, each token of it certain, look the same.
    rows = len(np.unique(view.row[both]))
    if both.sum() < LEAST or _run_length(view, both) < 3 or rows < max(3, 0.05 * len(view.sample.batch)):
        return nothing
    kinds, counts = np.unique(view.ids[both], return_counts=True)
    most = kinds[np.argmax(counts)]
    tokenizer = view.sample.facts.tokenizer
    known = [tokenizer[name] for name in ("pad", "eos") if isinstance(tokenizer.get(name), int)]
    # A row may end in a loop, each token of it certain. That one is not what ends or pads, or was not certain at times.
    elsewhere = ((view.ids == most) & ~both).sum()
    is_padding = most in known if known else elsewhere <= 0.02 * counts.max()
    if counts.max() < 0.9 * both.sum() or not is_padding:
        return nothing
    evidence = (
        f"{both.sum()} of {len(view)} tokens ({both.mean():.2%}) under the mask have log-prob 0.0 on both sides, in "
        f"blocks of {_run_length(view, both):.1f}, and are all of id {most}",
    )
    return Explained(finding("mask", 0.0, 1.0, evidence, {"fraction": float(both.mean())}), both)


def _grid(view: View, values: np.ndarray) -> np.ndarray:
    """(rows, longest): the values of each row's response tokens without gaps, then NaN."""
    counts = np.bincount(view.row, minlength=len(view.sample.batch))
    inside = np.arange(counts.max())[None, :] < counts[:, None]
    grid = np.full(inside.shape, np.nan)
    grid[inside] = values
    return grid


def misplaced(view: View) -> list[Explained]:
    """Rows whose log-probs belong to the neighbouring token, or to another row.

    The measure is the rank correlation along a row, because a sampler or a temperature on one side keeps the order of
    log-probs, but changes distances so much that a shift would not show in them.
    """
    if not len(view):
        return []
    train, rollout = _ranks(_grid(view, view.train)), _ranks(_grid(view, view.rollout))
    own = _correlation(train, rollout)
    moved = {shift: _correlation(train, _moved(rollout, shift)) for shift in SHIFTS}
    best = np.max(list(moved.values()), axis=0)
    off = own < _UNLIKE
    shifted = (best > _ALIKE) & (best > own + _BETTER)
    rows = max(int(np.isfinite(own).sum()), 1)
    swapped = _swapped(view, train, rollout, own, (own < _LIKE) & ~shifted)
    least = max(2, 0.01 * rows)
    # Of unrelated rows some resemble another by chance.
    is_shifted = shifted.sum() >= least
    is_swapped = swapped.sum() >= max(least, 0.5 * (off & ~shifted).sum())
    # If one of the two is found, rows that fit neither, or are too short to tell, are not evidence of another cause.
    unclear = (off | ~np.isfinite(own)) & ~shifted & ~swapped
    if shifted.sum() > 0.8 * rows:
        unclear, is_swapped = ~shifted, False
    return [
        _shift(view, moved, own, shifted, unclear) if is_shifted else _nothing(view, "shift", "moved by one or two"),
        _permutation(view, swapped, unclear) if is_swapped else _nothing(view, "permuted", "against another row"),
    ]


def _nothing(view: View, cause: str, how: str) -> Explained:
    return Explained(None, np.zeros(len(view), bool), (not_found(cause, f"no row fits better {how}"),))


def _shift(
    view: View, moved: dict[int, np.ndarray], own: np.ndarray, shifted: np.ndarray, unclear: np.ndarray
) -> Explained:
    best = np.max(list(moved.values()), axis=0)
    shift = max(SHIFTS, key=lambda s: int((moved[s][shifted] == best[shifted]).sum()))
    tokens = (shifted | unclear)[view.row]
    said = (
        f"{shifted.sum()} of {len(own)} rows fit when the engine's log-probs are moved by {-shift:+d}: the rank "
        f"correlation along a row rises from {np.median(own[shifted]):.2f} to {np.median(best[shifted]):.2f}"
    )
    return Explained(finding("shift", _share(view, tokens), 1.0, (said,), {"shift": -shift}), tokens)


def _permutation(view: View, swapped: np.ndarray, unclear: np.ndarray) -> Explained:
    tokens = (swapped | unclear)[view.row]
    said = f"{swapped.sum()} of {len(swapped)} rows have the log-probs of another row of their step"
    values = {"fraction": float(swapped.mean())}
    return Explained(finding("permuted", _share(view, tokens), 1.0, (said,), values), tokens)


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


def _moved(values: np.ndarray, shift: int) -> np.ndarray:
    """values[:, t + shift], NaN where there is none."""
    result = np.full_like(values, np.nan)
    if shift > 0:
        result[:, :-shift] = values[:, shift:]
    else:
        result[:, -shift:] = values[:, :shift]
    return result


def _swapped(view: View, train: np.ndarray, rollout: np.ndarray, own: np.ndarray, off: np.ndarray) -> np.ndarray:
    """(rows,) bool: rows of `off` whose engine log-probs correlate more with another row of the step than with their
    own tokens. A row that begins like its neighbour also correlates with its own tokens, in part.
    """
    result = np.zeros(len(off), bool)
    steps = view.sample.batch.step
    for step in np.unique(steps[off]):
        rows, candidates = np.flatnonzero(off & (steps == step))[:_MOST_ROWS], np.flatnonzero(steps == step)
        found = _between(rollout[rows][:, :_MOST_WIDTH], train[candidates[: 4 * _MOST_ROWS]][:, :_MOST_WIDTH])
        found[rows[:, None] == candidates[None, : 4 * _MOST_ROWS]] = np.nan
        closest = np.nan_to_num(found, nan=-1.0).max(axis=1, initial=-1.0)
        result[rows] = (closest > _ALIKE) & (closest > own[rows] + _BETTER)
    return result


def unrelated(view: View, total: int) -> Explained:
    """Whether the two sides are hardly correlated, as with other weights. `total`: tokens before any explanation."""
    nothing = np.zeros(len(view), bool)
    if len(view) < max(50, 0.3 * total):
        return Explained(None, nothing)
    # l is cut where a token's probability is beyond e^-20; so are the log-probs that it is held against.
    train, rollout = (values.clip(min=-MISSING) for values in (view.train, view.rollout))
    spread = train.var() + rollout.var()
    if min(view.train.var(), view.rollout.var()) > 0:
        correlation = float(np.corrcoef(view.train, view.rollout)[0, 1])
    else:  # one side, or both, is one number
        correlation = 0.0 if spread > 0 else 1.0
    rms = float(np.sqrt((view.log_ratio**2).mean()))
    evidence = f"the log-probs correlate by {correlation:.3f}, l is {rms:.3g} in the root mean square"
    variances = sorted((train.var(), rollout.var()))
    # Weights that were never loaded give every token nearly the same probability, whatever that correlates with.
    unlike = correlation < 0.6 or variances[0] < 0.05 * variances[1]
    if unlike and rms > 0.1 and (view.log_ratio**2).mean() > 0.5 * spread:
        everything = np.ones(len(view), bool)
        return Explained(finding("not_loaded", 1.0, 0.95, (evidence,), {"correlation": correlation}), everything)
    return Explained(None, nothing, (not_found("not_loaded", evidence),))
