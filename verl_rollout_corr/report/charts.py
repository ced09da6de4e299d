"""The charts of a report, from the counts of `Evidence`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verl_rollout_corr.report import svg
from verl_rollout_corr.report.evidence import (
    POSITION_EDGES,
    PROBABILITY_LABELS,
    RATIO_EDGES,
    WEIGHT_EDGES,
    Evidence,
    StepSums,
)
from verl_rollout_corr.report.page import Chart, Curves


def charts_of(evidence: Evidence) -> tuple[Chart, ...]:
    """Every chart that the dump has numbers for."""
    found = [
        *_over_steps(evidence.steps),
        _scatter(evidence),
        _ratios(evidence),
        _positions(evidence),
        _lengths(evidence),
        _lags(evidence),
        _weights(evidence),
    ]
    return tuple(chart for chart in found if chart is not None)


def mean_k3(sums: StepSums) -> float:
    """k3 per token."""
    return sums.k3 / sums.tokens if sums.tokens else float("nan")


def effective_size(sums: StepSums) -> float:
    """The effective sample size of the token weights, as a share."""
    return sums.weight**2 / (sums.tokens * sums.weight_square) if sums.weight_square else 0.0


def _over_steps(steps: dict[int, StepSums]) -> list[Chart]:
    if len(steps) < 2:  # a point is not a curve
        return []
    numbers = sorted(steps)
    sums = [steps[number] for number in numbers]
    kl = [one.kl / one.finite if one.finite else float("nan") for one in sums]
    kept = [one.kept_tokens / one.tokens if one.tokens else float("nan") for one in sums]
    size = [effective_size(one) for one in sums]
    return [
        _curves(
            "mismatch-over-steps",
            "Mismatch over steps",
            "Both estimate KL(μ‖π_train) per token; k3 is never negative.",
            numbers,
            (("k3", 1, [mean_k3(one) for one in sums]), ("|k1|", 2, [abs(value) for value in kl])),
            log=True,
        ),
        _curves(
            "kept-over-steps",
            "What training used",
            "Share of the tokens that were kept, and the effective sample size of the weights.",
            numbers,
            (("kept tokens", 3, kept), ("effective sample size", 4, size)),
            log=False,
        ),
    ]


def _curves(
    name: str,
    title: str,
    caption: str,
    x: Sequence[int],
    y: tuple[tuple[str, int, Sequence[float]], ...],
    *,
    log: bool,
) -> Chart:
    values = [value for _, _, series in y for value in series]
    across = svg.Axis("step", min(x, default=0), max(x, default=1))
    up = svg.log_axis("per token", values) if log else svg.Axis("share", 0.0, 1.0)
    curves = [svg.Line(label, list(zip(x, series, strict=True)), colour) for label, colour, series in y]
    shown = tuple((label, colour, [_finite(value, log) for value in series]) for label, colour, series in y)
    return Chart(name, title, svg.lines(title, across, up, curves), caption, Curves(list(x), shown, log))


def _finite(value: float, log: bool) -> float | None:
    return value if np.isfinite(value) and (value > 0 or not log) else None


def _scatter(evidence: Evidence) -> Chart:
    axis = ("log μ (engine)", "log π_train (trainer)")
    x, y = (svg.Axis(label, -12.0, 0.0) for label in axis)
    title = "The two log-probs of each token"
    return Chart(
        "scatter",
        title,
        svg.heat(title, x, y, evidence.scatter.tolist()),
        "On the dashed line the engines agree. A parallel band is an offset, a turned one a temperature.",
    )


def _ratios(evidence: Evidence) -> Chart:
    edges = RATIO_EDGES
    centres = (edges[1:] + edges[:-1]) / 2
    curves = []
    for index, label in enumerate(PROBABILITY_LABELS):
        total = evidence.ratios[index].sum()
        if total:
            shares = evidence.ratios[index][1:-1] / total
            points = [(float(_signed_log(c)), float(s)) for c, s in zip(centres, shares, strict=True)]
            curves.append(svg.Line(f"μ {label}", points, index + 1))
    top = max((y for curve in curves for _, y in curve.points), default=1.0)
    title = "Histogram of l = log π_train - log μ, by the engine's probability"
    named = tuple((_signed_log(value), f"{value:g}") for value in (-1, -0.1, -0.01, -1e-3, 0, 1e-3, 0.01, 0.1, 1))
    x = svg.Axis("l, logarithmic on both sides of 0", -6, 6, named=named)
    picture = svg.lines(title, x, svg.Axis("share of the bin", 0.0, top * 1.05), curves)
    return Chart(
        "ratios",
        title,
        picture,
        "0 is |l| of 1e-5 or less. Rounding is symmetric and largest for rare tokens; truncated sampling is one-sided.",
    )


def _signed_log(value: float) -> float:
    return float(np.sign(value) * max(5 + np.log10(max(abs(value), 1e-5)), 0.0))


def _positions(evidence: Evidence) -> Chart | None:
    counts, k3, _ = evidence.positions
    used = np.flatnonzero(counts)
    if not len(used):
        return None
    points = [(float(max(POSITION_EDGES[i], 1)), float(k3[i] / counts[i])) for i in used]
    x = svg.log_axis("position in the response", [at for at, _ in points], floor=0.5)
    y = svg.log_axis("mean k3", [value for _, value in points])
    title = "Mismatch against position"
    return Chart(
        "positions",
        title,
        svg.lines(title, x, y, [svg.Line("k3", points, 1)]),
        "Flat: rounding. Growing: rotary tables in low precision, or a cache. A step: a limit of the engine.",
    )


def _lengths(evidence: Evidence) -> Chart | None:
    rows, _, kept, tokens = evidence.lengths
    used = np.flatnonzero(rows)
    if not len(used):
        return None
    at = [float(tokens[i] / rows[i]) for i in used]
    x = svg.log_axis("response length", at, floor=0.5)
    share = [(length, float(kept[i] / rows[i])) for length, i in zip(at, used, strict=True)]
    title = "Kept sequences against length"
    return Chart(
        "lengths",
        title,
        svg.lines(title, x, svg.Axis("share", 0.0, 1.0), [svg.Line("kept sequences", share, 3)]),
        "A criterion that falls with length selects for short answers: products and maxima do, means do not.",
    )


def _lags(evidence: Evidence) -> Chart | None:
    known = {lag: sums for lag, sums in evidence.lags.items() if lag >= 0}
    if len(known) < 2:
        return None
    points = [(float(lag), mean_k3(sums)) for lag, sums in sorted(known.items())]
    x = svg.Axis("lag, in published versions", 0, max(known))
    y = svg.log_axis("mean k3", [value for _, value in points])
    title = "Mismatch against lag"
    return Chart(
        "lags",
        title,
        svg.lines(title, x, y, [svg.Line("k3", points, 2)]),
        "The value at lag 0 is the engine's own; what is above it comes from old weights.",
    )


def _weights(evidence: Evidence) -> Chart | None:
    inside = evidence.weights[1:-1]
    ones = evidence.weights.sum() == evidence.weights[np.digitize(1.0, WEIGHT_EDGES)]
    if ones or not inside.sum():
        return None
    edges = np.concatenate([[WEIGHT_EDGES[1] / 2], WEIGHT_EDGES[1:]])
    shares = inside / evidence.weights.sum()
    x = svg.Axis("weight", float(edges[0]), float(edges[-1]), log=True)
    title = "Weights as they were applied"
    return Chart(
        "weights",
        title,
        svg.bars(
            title,
            x,
            svg.Axis("share of the tokens", 0.0, float(shares.max()) * 1.05),
            edges.tolist(),
            shares.tolist(),
            4,
        ),
        "The first bar holds weights of 0 too. A bar at the bound is what the bound cut.",
    )
