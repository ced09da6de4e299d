"""Charts as inline SVG: drawn without JavaScript, in print too. Colours are classes, which light and dark define."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 40

Scale = Callable[[float], float]
"""Maps a value to a place in the drawing."""


@dataclass(frozen=True)
class Line:
    """A curve: points (x, y) and the number of its colour, 1 to 5; a point with a NaN is a gap."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: int = 1


@dataclass(frozen=True)
class Axis:
    """An axis: its label, its range, and whether it is logarithmic (values below the range are drawn at its start).

    `named` are ticks with a text of their own, instead of round numbers.
    """

    label: str
    low: float
    high: float
    log: bool = False
    named: tuple[tuple[float, str], ...] = ()

    def scale(self, start: float, end: float) -> Scale:
        """Maps a value to a place between `start` and `end`."""
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        span = (high - low) or 1.0

        def place(value: float) -> float:
            at = math.log10(max(value, self.low)) if self.log else value
            return start + (min(max(at, low), high) - low) / span * (end - start)

        return place

    def ticks(self) -> list[tuple[float, str]]:
        """Places along the axis with their texts: those of `named`, else round numbers."""
        return list(self.named) or [(value, number(value)) for value in self._round()]

    def _round(self) -> list[float]:
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            every = max(1, math.ceil((last - first + 1) / 6))
            return [10.0**power for power in range(first, last + 1, every)]
        span = (self.high - self.low) or 1.0
        step = 10 ** math.floor(math.log10(span / 4))
        step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 6)
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def log_axis(label: str, values: Sequence[float], floor: float = 1e-12) -> Axis:
    """A logarithmic axis around positive values, at least two decades long."""
    positive = [value for value in values if value > floor and math.isfinite(value)] or [1e-6]
    low, high = 10 ** math.floor(math.log10(min(positive))), 10 ** math.ceil(math.log10(max(positive)))
    if high / low < 100:
        low /= 10
    return Axis(label, low, high, log=True)


def number(value: float) -> str:
    """A number on an axis, short."""
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}"
    mantissa, _, power = f"{value:.0e}".partition("e")
    return f"{mantissa}e{int(power)}"


def _frame(x: Axis, y: Axis) -> tuple[list[str], Scale, Scale]:
    across, up = x.scale(LEFT, WIDTH - RIGHT), y.scale(HEIGHT - BOTTOM, TOP)
    parts: list[str] = []
    for tick, text in y.ticks():
        at = up(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{text}</text>')
    for tick, text in x.ticks():
        at = across(tick)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text class="tick" x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{text}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="label" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x.label)}</text>')
    half = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text class="label" x="14" y="{half}" text-anchor="middle" transform="rotate(-90 14 {half})">'
        f"{escape(y.label)}</text>"
    )
    return parts, across, up


def _svg(title: str, parts: Sequence[str], height: int = HEIGHT) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title, quote=True)}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def lines(title: str, x: Axis, y: Axis, curves: Sequence[Line], marks: Sequence[tuple[float, str]] = ()) -> str:
    """Curves over one axis; `marks` are horizontal lines at a value with a label, such as a bound."""
    parts, across, up = _frame(x, y)
    for value, label in marks:
        at = up(value)
        parts.append(f'<line class="mark" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(
            f'<text class="marklabel" x="{WIDTH - RIGHT - 4}" y="{at - 4:.1f}" text-anchor="end">{escape(label)}</text>'
        )
    for curve in curves:
        for run in _runs(curve.points):
            path = " ".join(f"{across(px):.1f},{up(py):.1f}" for px, py in run)
            if len(run) == 1:
                cx, cy = path.split(",")
                parts.append(f'<circle class="c{curve.colour} dot" cx="{cx}" cy="{cy}" r="3"/>')
            else:
                parts.append(f'<polyline class="c{curve.colour} line" points="{path}"/>')
    return _svg(title, parts) + legend(curves)


def _runs(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if math.isnan(y):
            runs.append([])
        else:
            runs[-1].append((x, y))
    return [run for run in runs if run]


def legend(curves: Sequence[Line]) -> str:
    """The labels of several curves, below the chart."""
    if len(curves) < 2:
        return ""
    items = "".join(f'<li><span class="swatch s{curve.colour}"></span>{escape(curve.label)}</li>' for curve in curves)
    return f'<ul class="legend">{items}</ul>'


def bars(title: str, x: Axis, y: Axis, edges: Sequence[float], heights: Sequence[float], colour: int = 1) -> str:
    """A histogram: a bar between each two edges."""
    parts, across, up = _frame(x, y)
    base = up(y.low)
    for left, right, height in zip(edges, edges[1:], heights, strict=False):
        if height <= (y.low if y.log else 0) or math.isnan(height):
            continue
        a, b, at = across(left), across(right), up(height)
        parts.append(
            f'<rect class="c{colour} bar" x="{a:.1f}" y="{at:.1f}" width="{max(b - a - 0.6, 0.6):.1f}" '
            f'height="{max(base - at, 0):.1f}"/>'
        )
    return _svg(title, parts)


def heat(title: str, x: Axis, y: Axis, counts: Sequence[Sequence[float]]) -> str:
    """A scatter in bins: counts[i][j] at column i and row j (from below), in eight shades of the count's logarithm."""
    parts, _, _ = _frame(x, y)
    columns, rows = len(counts), len(counts[0])
    width, height = (WIDTH - LEFT - RIGHT) / columns, (HEIGHT - TOP - BOTTOM) / rows
    top = math.log1p(max((max(column) for column in counts), default=0)) or 1.0
    for i, column in enumerate(counts):
        for j, count in enumerate(column):
            if count:
                shade = min(7, int(math.log1p(count) / top * 8))
                parts.append(
                    f'<rect class="h{shade}" x="{LEFT + i * width:.1f}" y="{HEIGHT - BOTTOM - (j + 1) * height:.1f}" '
                    f'width="{width + 0.2:.1f}" height="{height + 0.2:.1f}"/>'
                )
    parts.append(
        f'<line class="mark" x1="{LEFT}" y1="{HEIGHT - BOTTOM}" x2="{WIDTH - RIGHT}" y2="{TOP}"/>'
        f'<text class="marklabel" x="{WIDTH - RIGHT - 60}" y="{TOP + 14}" text-anchor="end">equal</text>'
    )
    return _svg(title, parts)
