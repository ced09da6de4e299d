"""Detectors of log-probs that are missing: stand-ins, zeros and constants, told apart by where they are."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from verl_rollout_corr.diagnosis.explained import FAR, LEAST, Explained, finding, share_of
from verl_rollout_corr.diagnosis.view import View


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
        if value and _of_a_loop(view, tokens):
            continue
        part = _constant(view, tokens, left, value, side)
        if tokens.mean() > 0.5:  # then it is no log-prob at tokens that happen to have it, either
            tokens = left & (values == value)
            part = replace(part, tokens=tokens)
        found.append(part)
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
    said = (
        f"{bad.sum()} of {len(view)} tokens ({bad.mean():.2%}) have {most:g} as the {side}'s log-prob, "
        f"in {len(np.unique(view.row[bad]))} rows"
    )
    if len(kinds) > max(10, 0.2 * bad.sum()):
        more = f"they range from {kinds[0]:.3g} to {kinds[-1]:.3g}: no log-prob is above 0, nor that far below"
        said = f"{bad.sum()} of {len(view)} tokens ({bad.mean():.2%}) have impossible log-probs of the {side}"
        return Explained(
            finding("sentinel", share_of(view, bad), 0.8, (said, more), {"fraction": float(bad.mean())}), bad
        )
    place = _place(view, bad) if bad.sum() >= LEAST else None
    cause = "sentinel" if place is None or place.cause == "constant" else place.cause
    where, more = ((), {}) if place is None else ((place.said,), place.values)
    values_of = {"fraction": float(bad.mean())} | more
    return Explained(finding(cause, share_of(view, bad), 1.0, (said, *where), values_of), bad)


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
    if _is_tie(value):
        return None
    if value == 0.0 and (values[left] == 0.0).mean() < 0.8:
        # An engine that keeps one token of a truncated distribution is certain of it, but of no unlikely one.
        zero = far & (values == 0.0)
        if (other[zero] < -2.5).mean() < 0.15:
            return None
    return value


def _is_tie(value: float) -> bool:
    """Whether it is -log n for a small n: tokens of one rounded logit, the only ones that a truncation keeps."""
    count = round(float(np.exp(-value))) if -3 < value < 0 else 0
    return 2 <= count <= 16 and abs(value + np.log(count)) < 1e-6


def _of_a_loop(view: View, tokens: np.ndarray) -> bool:
    """Whether all of `tokens` are one id within rows: a text that repeats gives an engine the same number each time."""
    return view.ids is not None and len(np.unique(view.ids[tokens])) == 1 and view.last[tokens].mean() < 0.5


def _constant(view: View, tokens: np.ndarray, left: np.ndarray, value: float, side: str) -> Explained:
    count, share = int(tokens.sum()), share_of(view, tokens)
    rows = len(np.unique(view.row[tokens]))
    said = f"{count} of {len(view)} tokens ({tokens.mean():.2%}) have {value:g} as the {side}'s log-prob"
    values = {"fraction": float(tokens.mean()), "value": value}
    found = _place(view, tokens)
    tail = found is not None and found.cause == "truncated_tail"
    if not tail and value == 0 and tokens.mean() > 0.5 and len(tokens) > 50:
        greedy = "greedy decoding (temperature 0, or top_k=1) looks the same: each token has probability 1 then"
        return Explained(finding("zeros", share, 0.7, (said, f"in {rows} rows", greedy), values), tokens)
    if found is None:
        found = _Place("zeros" if value == 0 else "constant", f"scattered over {rows} rows")
    return Explained(finding(found.cause, share, 1.0, (said, found.said), values | found.values), tokens)


@dataclass(frozen=True)
class _Place:
    """Where tokens without log-probs are: the cause that this tells, and the evidence."""

    cause: str
    said: str
    values: dict[str, float] = field(default_factory=dict)


def _place(view: View, tokens: np.ndarray) -> _Place | None:
    """The pattern of `tokens` (N,) bool: a tail, whole rows, a few ids, an edge or blocks. None if scattered."""
    per_row, total = np.bincount(view.row[tokens], minlength=view.row.max() + 1), np.bincount(view.row)
    tail = _tail_start(view, tokens)
    if tail is not None:
        return _Place(
            "truncated_tail", f"all of them from position {tail} on, to the end of their rows", {"position": tail}
        )
    whole = (per_row == total) & (total >= 8)
    if per_row[whole].sum() > 0.8 * tokens.sum():
        return _Place("constant", f"{int(whole.sum())} whole rows of {len(total[total > 0])}")
    ids = _ids_of(view, tokens)
    if ids:
        where = "always at the end of its row" if view.last[tokens].mean() > 0.8 else "within rows"
        which = f"token id {ids[0]}, {where}" if len(ids) == 1 else f"the token ids {', '.join(map(str, ids))}"
        return _Place("token", f"all of them of {which}", {"token": ids[0]})
    edge = _edge(view, tokens)
    if edge is not None:
        cause, which = edge
        return _Place(cause, f"nearly all of them are the {which}")
    runs, expected = _run_length(view, tokens), 1 / max(1 - tokens.mean(), 1e-9)
    if runs >= max(2.5 * expected, 2.5):
        return _Place("mask", f"in blocks of {runs:.1f} tokens on average, by chance they would be {expected:.1f}")
    return None


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


def _ids_of(view: View, tokens: np.ndarray) -> list[int]:
    """The few ids that nearly all of `tokens` have, each nearly always missing: one that is appended, or a template."""
    if view.ids is None:
        return []
    kinds, counts = np.unique(view.ids[tokens], return_counts=True)
    total = np.array([(view.ids == kind).sum() for kind in kinds]) if len(kinds) <= 1000 else np.full(len(kinds), -1)
    order = np.argsort(-counts)
    if counts[order[0]] >= 0.9 * tokens.sum() and counts[order[0]] > 0.5 * total[order[0]] > 0:
        return [int(kinds[order[0]])]
    whole = [at for at in order[:8] if counts[at] >= LEAST and counts[at] >= 0.8 * total[at] > 0]
    return [int(kinds[at]) for at in whole] if counts[whole].sum() >= 0.9 * tokens.sum() else []


def _edge(view: View, tokens: np.ndarray) -> tuple[str, str] | None:
    """The cause and the name of the edge of responses or turns that nearly all of `tokens` are."""
    first = np.minimum.reduceat(view.position, starts := np.flatnonzero(np.diff(view.row, prepend=-1)))
    begins = view.position == np.repeat(first, np.diff(starts, append=len(view)))
    edges = [("boundary", "first token of a response", begins), ("boundary", "last token of a response", view.last)]
    if view.turn_starts.sum() > 1.5 * len(starts):
        off = "token of a turn: the mask is off by one there"
        edges += [("mask", f"first {off}", view.turn_starts), ("mask", f"last {off}", view.turn_ends)]
    for cause, name, edge in edges:
        if edge[tokens].mean() > 0.9 and tokens.sum() > 0.3 * edge.sum():
            return cause, name
    return None


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
