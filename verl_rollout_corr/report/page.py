"""The HTML page: one file without a network, drawn from a `Report` record."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import verl_rollout_corr


@dataclass(frozen=True)
class Fact:
    """One number of the first screen."""

    name: str
    value: str
    meaning: str


@dataclass(frozen=True)
class FoundCause:
    """A cause, as the page shows it."""

    cause: str
    confidence: str
    evidence: tuple[str, ...]
    remedy: str


@dataclass(frozen=True)
class Curves:
    """The numbers of a chart over steps, for the script."""

    x: Sequence[float]
    y: Sequence[tuple[str, int, Sequence[float | None]]]  # label, colour, values
    log: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart: its picture is SVG of ours, the only part of a report that is not escaped."""

    id: str
    title: str
    picture: str
    caption: str
    curves: Curves | None = None


@dataclass(frozen=True)
class Table:
    """A table of text cells."""

    title: str
    caption: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class ShownToken:
    """A token of a sequence; `shade` is one of `SHADES`, or "" for a small difference."""

    text: str
    shade: str
    note: str
    position: int
    train: str
    rollout: str
    log_ratio: str


@dataclass(frozen=True)
class ShownSequence:
    """A sequence with the tokens around its largest difference, and the largest ones in a table."""

    title: str
    tokens: tuple[ShownToken, ...]
    largest: tuple[ShownToken, ...]


@dataclass(frozen=True)
class Report:
    """Everything on the page. `level` is ok, watch, act or unknown."""

    title: str
    subtitle: str
    level: str
    verdict: str
    advice: tuple[str, ...] = ()
    command: str = ""
    facts: tuple[Fact, ...] = ()
    findings: tuple[FoundCause, ...] = ()
    excluded: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    where: tuple[Table, ...] = ()
    sequences: tuple[ShownSequence, ...] = ()
    configuration: str = ""
    notes: tuple[str, ...] = field(default=())


def render(report: Report) -> str:
    """The page. Every text of the record is escaped; scripts and styles are allowed by their digests alone."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    css = _asset("uPlot.min.css") + _asset("report.css")
    # A page holds a copy of uPlot, and its licence asks that each copy contains it.
    script = "\n".join(("/*", _asset("uPlot.LICENSE"), "*/", _asset("uPlot.iife.min.js"), _asset("report.js")))
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_digest(css)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    charts = tuple(
        Chart(chart.id, chart.title, Markup(chart.picture), chart.caption, chart.curves) for chart in report.charts
    )
    shown = {name: getattr(report, name) for name in report.__dataclass_fields__} | {"charts": charts}
    return environment.from_string(_asset("report.html.j2")).render(
        report=shown,
        policy=policy,
        css=Markup(css),
        script=Markup(script),
        curves=Markup(script_json([_curves(chart) for chart in report.charts if chart.curves is not None])),
        version=verl_rollout_corr.__version__,
    )


def script_json(value: Any) -> str:
    """JSON in which no text can end the script element that holds it."""
    text = json.dumps(value, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _curves(chart: Chart) -> dict[str, Any]:
    curves = chart.curves
    assert curves is not None
    lines = [{"label": label, "colour": colour, "values": list(values)} for label, colour, values in curves.y]
    return {"id": chart.id, "x": list(curves.x), "y": lines, "log": curves.log}


def _asset(name: str) -> str:
    return (files("verl_rollout_corr") / "report" / "assets" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
