"""Charts: where a value is drawn, and that text cannot leave its place."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import pytest

from verl_rollout_corr.report import svg


def elements(picture: str, tag: str) -> list[ElementTree.Element]:
    """The elements of the drawing, without the legend behind it."""
    return list(ElementTree.fromstring(picture[: picture.index("</svg>") + 6]).iter(tag))


def test_a_linear_axis_puts_values_between_its_ends() -> None:
    place = svg.Axis("x", 0, 10).scale(100, 200)
    assert [place(value) for value in (0, 5, 10, 20)] == [100, 150, 200, 200]


def test_a_logarithmic_axis_counts_decades() -> None:
    place = svg.Axis("y", 1e-4, 1, log=True).scale(0, 400)
    assert [round(place(value), 9) for value in (1e-4, 1e-2, 1, 0)] == [0, 200, 400, 0]
    assert [text for _, text in svg.Axis("y", 1e-4, 1, log=True).ticks()] == ["1e-4", "0.001", "0.01", "0.1", "1"]


def test_round_numbers_on_an_axis() -> None:
    assert [value for value, _ in svg.Axis("x", 0, 1).ticks()] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])


def test_an_axis_around_values_spans_two_decades() -> None:
    axis = svg.log_axis("k3", [2e-4, 3e-4, 0.0, math.inf])
    assert axis.low <= 2e-4 < 3e-4 <= axis.high
    assert axis.high / axis.low >= 100
    assert svg.log_axis("nothing", []).high > 0


def test_a_gap_breaks_a_line() -> None:
    points = [(0, 0.1), (1, 0.2), (2, math.nan), (3, 0.3)]
    picture = svg.lines("t", svg.Axis("x", 0, 3), svg.Axis("y", 0, 1), [svg.Line("a", points)])
    assert len(elements(picture, "{*}polyline") or elements(picture, "polyline")) == 1
    assert len(elements(picture, "circle")) == 1


def test_text_is_escaped() -> None:
    picture = svg.lines('<a">', svg.Axis("<x>", 0, 1), svg.Axis("y", 0, 1), [svg.Line("<b>", []), svg.Line("c", [])])
    assert "<a" not in picture
    assert "<x>" not in picture
    assert "<b>" not in picture
    ElementTree.fromstring(picture[: picture.index("</svg>") + 6])


def test_bars_and_heat_draw_what_is_there() -> None:
    bars = svg.bars("t", svg.Axis("x", 0, 2), svg.Axis("y", 0, 1), [0, 1, 2], [0.5, 0.0])
    assert len(elements(bars, "rect")) == 1
    heat = svg.heat("t", svg.Axis("x", 0, 1), svg.Axis("y", 0, 1), [[0, 1], [100, 0]])
    shades = sorted(element.attrib["class"] for element in elements(heat, "rect"))
    assert shades == ["h1", "h7"]
