"""Detectors of places where a mismatch is concentrated: some rows, steps, positions, one token id, or a few tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from verl_rollout_corr.diagnosis.explained import finding, not_found
from verl_rollout_corr.diagnosis.precision import BF16
from verl_rollout_corr.diagnosis.records import Checked, Finding
from verl_rollout_corr.diagnosis.sampler import hinges, residuals, split, winsorised
from verl_rollout_corr.diagnosis.view import View, median_by, typical

_FEW, _BEHIND, _TAIL, _JUMP = 5, 6, 0.7, 0.75
"""From 5 outliers on: the log of how much smaller the |l| at rank 6n is than at rank n, minus .7 of the log of how much
it falls from there to rank 36n, is above .75."""
_SINGLE_JUMP, _SINGLE_LEAST = 1.9, 3.0
"""The same for one to four tokens, and the least |l| that they have."""

Verdict = Finding | Checked
"""A cause that was found, or the evidence against it."""


@dataclass(frozen=True)
class Noise:
    """The residual of l after fitting a curve over the log-prob, and its square relative to equally likely tokens."""

    view: View
    by_position: bool = False

    @cached_property
    def rest(self) -> np.ndarray:
        """(N,) the residual: l minus the curve."""
        return residuals(hinges(self.view.middle), self.view.log_ratio)

    @cached_property
    def relative(self) -> np.ndarray:
        """(N,) the square of the residual, cut at its quantile .99, over its mean among equally likely tokens."""
        square = winsorised(self.rest) ** 2
        edges = np.unique(np.quantile(self.view.middle, np.linspace(0, 1, 11)[1:-1]))
        bins = np.searchsorted(edges, self.view.middle)
        mean = np.bincount(bins, square) / np.maximum(np.bincount(bins), 1)
        return square / np.maximum(mean[bins], 1e-300)

    @cached_property
    def bins(self) -> np.ndarray:
        """(N,) one of 20 bins of equally likely tokens."""
        edges = np.unique(np.quantile(self.view.middle, np.linspace(0, 1, 21)[1:-1]))
        return np.searchsorted(edges, self.view.middle)

    @cached_property
    def size(self) -> np.ndarray:
        """(N,) |residual| over its median among equally likely tokens. Cut at 3, so that a few do not decide a row."""
        size = np.abs(self.rest)
        size = size / np.maximum(median_by(size, self.bins), 1e-12)
        if self.by_position:
            parts = np.searchsorted(
                np.unique(np.quantile(self.view.position, np.linspace(0, 1, 17)[1:-1])),
                self.view.position,
                side="right",
            )
            typical_at = np.array(
                [np.median(size[parts == part]) if (parts == part).any() else 1.0 for part in range(parts.max() + 1)]
            )
            size = size / np.maximum(typical_at[parts], 1e-12)
        return np.minimum(size, 3.0)


def by_token(view: View, noise: Noise, *, beside: bool = False) -> Verdict:
    """One token id with an offset of its own, or with a larger l of either sign. `beside`: a sampler was found, under
    which ids differ from each other: then only one that stands out twice as much counts.
    """
    if view.ids is None:
        return not_found("token", "the dump has no token ids")
    kinds, inverse, counts = np.unique(view.ids, return_inverse=True, return_counts=True)
    square = view.log_ratio**2
    # Of each id what its mean explains; one rare token does not make an id.
    explained = np.bincount(inverse, noise.rest) ** 2 / counts
    explained[counts < 5] = 0.0
    worst = int(np.argmax(explained))
    share = float(explained[worst] / max(square.sum(), 1e-300))
    mean = float(np.bincount(inverse, noise.rest)[worst] / counts[worst])
    of_id = inverse == worst
    error = float(noise.rest[of_id].std() / np.sqrt(counts[worst])) + 1e-12
    second = float(np.sort(explained)[-2]) if len(explained) > 1 else 0.0
    said = (
        f"token id {kinds[worst]} ({counts[worst]} times) has a mean l of {mean:+.3f}, "
        f"{share:.1%} of the mean square of l"
    )
    if share < 0.15 or abs(mean) < 6 * error or explained[worst] < 3 * second:
        return _by_spread(view, noise, inverse, kinds, counts, 0.2 if beside else 0.1) or not_found("token", said)
    return finding(
        "token", share, 0.95, (said, _place_of(view, kinds[worst])), {"token": float(kinds[worst]), "mean": mean}
    )


def _place_of(view: View, token: int) -> str:
    assert view.ids is not None
    of_id = view.ids == token
    known = view.sample.facts.tokenizer.get("eos")
    # A stranger's file may have anything in its place.
    eos = ", and EOS" if isinstance(known, int) and token == known else ""
    return f"it is the last token of its row in {view.last[of_id].mean():.0%} of the cases{eos}"


def _by_spread(
    view: View, noise: Noise, inverse: np.ndarray, kinds: np.ndarray, counts: np.ndarray, least: float
) -> Finding | None:
    """A token id whose l is large, of either sign: its row of the head or of the embedding differs."""
    square = np.bincount(inverse, noise.relative)
    often = counts / counts.sum()
    share = square / max(float(square.sum()), 1e-300)
    # Of noise an id has the share that it has of the tokens.
    worst = int(np.argmax(np.where((counts >= 20) & (share > 5 * often), share, 0.0)))
    if counts[worst] < 20 or share[worst] < max(least, 5 * often[worst]):
        return None
    said = (
        f"token id {kinds[worst]} is {often[worst]:.1%} of the tokens and has {share[worst]:.0%} of the mean square of "
        "l, relative to tokens as likely"
    )
    return finding(
        "token", float(share[worst]), 0.85, (said, _place_of(view, kinds[worst])), {"token": float(kinds[worst])}
    )


def by_position(view: View, noise: Noise) -> Verdict:
    """A mismatch that grows with the position."""
    quarters = _quarters(view.position)
    if quarters is None:
        return not_found("position", "the responses are too short to tell")
    counts = np.bincount(quarters)
    means = np.bincount(quarters, noise.relative) / counts
    spread = np.bincount(quarters, noise.relative**2) / counts - means**2
    growth = float(means[-1] / max(means[0], 1e-300))
    score = float((means[-1] - means[0]) / np.sqrt(spread[0] / counts[0] + spread[-1] / counts[-1] + 1e-300))
    said = (
        f"tokens as likely have {growth:.2g} times the mean square of l in the last quarter of positions that they "
        f"have in the first ({score:.1f} standard errors)"
    )
    steady = np.all(np.diff(means) > -0.1 * means[:-1])
    if growth < 1.6 or score < 5 or not steady:
        return not_found("position", said)
    # The first quarter has little of it: what is above that level is the share.
    share = float(1 - means[0] * len(view) / noise.relative.sum())
    return finding("position", share, min(0.5 + growth / 20, 0.95), (said,), {"growth": growth})


def by_boundary(view: View, noise: Noise) -> Verdict:
    """A mismatch of the first, or the last, token of each response or turn."""
    beginning = np.zeros(len(view.sample.batch), np.int64)
    order = np.flatnonzero(view.sample.batch.mask)[::-1]
    beginning[view.sample.row[order]] = view.sample.position[order]
    first = view.position == beginning[view.row]
    places = {"the first token of a response": first, "the last token of a response": view.last}
    if view.turn_starts.sum() > 1.5 * first.sum():
        places |= {"the first token of a turn": view.turn_starts, "the last token of a turn": view.turn_ends}
    square = noise.rest**2
    said = "the first and last tokens of responses and turns differ as much as others"
    for name, tokens in places.items():
        count = int(tokens.sum())
        if count < 16 or tokens.mean() > 0.2:
            continue
        inside, outside = noise.size[tokens], noise.size[~tokens]
        times = float(inside.mean() / max(float(outside.mean()), 1e-300))
        score = float((inside.mean() - outside.mean()) / (inside.std() / np.sqrt(count) + 1e-12))
        share = float(square[tokens].sum() / max(square.sum(), 1e-300))
        if times > 1.6 and score > 6 and share > 0.15 and share > 4 * tokens.mean():
            evidence = (
                f"{name} is {tokens.mean():.1%} of the tokens and has {share:.0%} of the mean square of l; its typical "
                f"|l| is {times:.2g} times that of tokens as likely",
            )
            return finding("boundary", share, 0.9, evidence, {"times": times})
    return not_found("boundary", said)


def _quarters(values: np.ndarray) -> np.ndarray | None:
    edges = np.quantile(values, [0.25, 0.5, 0.75])
    if len(np.unique(edges)) < 3 or values.max() < 8:
        return None
    return np.searchsorted(edges, values, side="right")


def by_lag(view: View, noise: Noise, *, only_known: bool = False) -> Verdict:
    """Rows of older weights: by their lag if it is known, else (unless `only_known`) by rows that clearly differ."""
    lag = view.sample.batch.lag[view.row]
    fresh, old = lag == 0, lag > 0
    if fresh.sum() >= 100 and old.sum() >= 100:
        return _by_known_lag(view, fresh, old)
    if old.all() and typical(view.log_ratio) > BF16:
        said = (
            f"every row has a lag of at least 1 (on average {lag.mean():.1f}), and no row of lag 0 "
            "tells the engine's part"
        )
        return finding("stale", 1.0, 0.6, (said,), {"fraction": 1.0})
    counts = np.bincount(view.row, minlength=len(view.sample.batch))
    rows = np.flatnonzero(counts >= 6)
    if len(rows) < 12 or only_known:
        return not_found("stale", "no lags to tell by" if only_known else "too few rows to tell")
    means, spread = _row_sizes(noise.size, view.row, rows)
    # Where the two sides are equal there is no size to take the log of.
    means, spread = np.maximum(means, 1e-300), np.maximum(spread, 1e-300)
    ordered = np.sort(np.log(means))
    place, gap = split(ordered)
    apart = np.log(means) > ordered[place]
    tokens = np.isin(view.row, rows[apart])
    share = float((view.log_ratio[tokens] ** 2).sum() / max(view.energy, 1e-300))
    fraction, scatter = float(apart.mean()), float(means.var() / np.mean(spread))
    said = (
        f"{apart.sum()} of {len(rows)} rows stand apart: their typical |l| is {np.exp(gap):.2g} times that of the "
        f"others, and rows scatter {scatter:.2g} times as much as by chance"
    )
    # Rows that all claim lag 0 and differ may be of different texts: only a gap that texts do not make counts.
    least = 0.45 if fresh.all() else 0.28
    # Rows of the trainer's own weights differ by precision alone. If no row does, the whole dump has another cause.
    quiet = typical(view.log_ratio[~tokens]) if not tokens.all() else 0.0
    if quiet > 2 * BF16:
        return not_found("stale", f"{said}, and the others differ by {quiet:.2g}, more than weights of one version do")
    # A few rows below the others are loops, or texts that are certain. Old weights make rows that are above the others.
    if fraction > 0.6:
        least = max(least, 0.7)
    if gap < least or scatter < 2 or not 0.02 <= fraction <= 0.8 or share < 0.3 or apart.sum() < 3:
        return not_found("stale", said)
    values = {"fraction": fraction, "apart": float(np.exp(gap))}
    return finding("stale", share, 0.85, (said, f"they hold {share:.0%} of the mean square of l"), values)


def _row_sizes(size: np.ndarray, row: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean size of each row's tokens, and its variance if they were independent."""
    parts = _split(size, row, rows)
    return np.array([part.mean() for part in parts]), np.array([part.var() / len(part) for part in parts])


def _by_known_lag(view: View, fresh: np.ndarray, old: np.ndarray) -> Verdict:
    square = winsorised(view.log_ratio) ** 2
    floor, found = float(square[fresh].mean()), float(square[old].mean())
    share = float(((found - floor) * old.sum()) / max(square.sum(), 1e-300))
    times = found / max(floor, 1e-300)
    said = (
        f"rows of lag > 0 ({old.mean():.0%} of the tokens) have {times:.2g} times the mean square of l that "
        "rows of lag 0 have"
    )
    if found < 1.5 * floor or share < 0.1:
        return not_found("stale", said)
    return finding("stale", share, 0.95, (said,), {"fraction": float(old.mean()), "times": times})


def _split(values: np.ndarray, row: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
    starts = np.searchsorted(row, rows, side="left")
    stops = np.searchsorted(row, rows, side="right")
    return [values[start:stop] for start, stop in zip(starts, stops, strict=True)]


def by_step(steps: np.ndarray, sizes: np.ndarray) -> Verdict:
    """A mismatch (mean |l| of each step) that grows from step to step."""
    if len(steps) < 4:
        return not_found("drift", f"{len(steps)} steps are too few to tell")
    order = np.argsort(steps)
    steps, sizes = steps[order], sizes[order]
    thirds = max(len(steps) // 3, 1)
    first, last = float(np.median(sizes[:thirds])), float(np.median(sizes[-thirds:]))
    growth = last / max(first, 1e-300)
    ranks = np.argsort(np.argsort(sizes))
    trend = float(np.corrcoef(np.arange(len(steps)), ranks)[0, 1]) if len(set(sizes.tolist())) > 1 else 0.0
    said = f"mean |l| goes from {first:.3g} to {last:.3g} over {len(steps)} steps (rank correlation {trend:.2f})"
    if growth < 1.7 or trend < 0.7:
        return not_found("drift", said)
    return finding("drift", 1 - first / last, min(0.5 + trend / 2, 0.97), (said,), {"growth": growth, "trend": trend})


def by_size(view: View, noise: Noise) -> Verdict:
    """A few tokens far from all others, which make up much of the mean square.

    The n largest are compared with the one at rank 6n. In noise, however heavy its tails, |l| falls off steadily with
    the rank, so that the fall from rank 6n to 36n tells what to expect. |l| is divided by the square root of its median
    among equally likely tokens: noise is larger for unlikely tokens, and a fault need not be. The jumps that count are
    above those of 530 clean dumps of the tuning seeds.
    """
    if len(view) < 200:
        return not_found("outliers", "too few tokens to tell")
    rest = np.abs(noise.rest)
    scaled = rest / np.sqrt(np.maximum(median_by(rest, noise.bins), 1e-3))
    order = np.argsort(-scaled)
    size = np.maximum(scaled[order], 1e-100)
    energy = np.cumsum(size**2) / max(float((size**2).sum()), 1e-300)
    counts = np.arange(1, max(int(0.005 * len(size)), _FEW) + 1)
    behind, tail = (size[(at * counts).clip(max=len(size)) - 1] for at in (_BEHIND, _BEHIND**2))
    jump = np.log(size[counts - 1] / behind) - _TAIL * np.log(behind / tail)
    least = np.minimum.accumulate(rest[order])[counts - 1]
    few = counts < _FEW
    clear = np.where(few, (jump > _SINGLE_JUMP) & (least > _SINGLE_LEAST), jump > _JUMP) & (energy[counts - 1] >= 0.3)
    best = int(np.argmax(np.where(clear, jump, jump - 100 - 100 * few)))
    if clear[best]:  # a plateau: all of them, and not the first alone
        best = int(np.flatnonzero(clear & (jump > 0.8 * jump[best]))[-1])
    count, falls = int(counts[best]), float(size[best] / behind[best])
    share = float((rest[order[:count]] ** 2).sum() / max(float((rest**2).sum()), 1e-300))
    said = (
        f"the {count} tokens that differ most hold {share:.0%} of the mean square of l, all with |l| above "
        f"{least[best]:.2g}; the {_BEHIND * count}th differs {falls:.2g} times less, relative to tokens as likely"
    )
    if not clear[best]:
        return not_found("outliers", said)
    if (others := typical(rest)) > 2 * BF16:
        return not_found("outliers", f"{said}; but all tokens differ by {others:.2g}, more than BF16 makes")
    return finding("outliers", share, 0.85, (said,), {"tokens": float(count), "least": float(least[best])})
