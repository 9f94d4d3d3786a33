"""Charts are read back as XML: what is drawn where."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from llmcomp.pages.chart import BAR, COLORS, HEIGHT, LABELS, Line, bars, lines


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("text")]


def circles(svg: str) -> list[tuple[float, float, str]]:
    """(x, y, what its title says) of the points."""
    found = [(c, c.find("title")) for c in ElementTree.fromstring(svg).iter("circle")]
    return [(float(c.attrib["cx"]), float(c.attrib["cy"]), title.text or "") for c, title in found if title is not None]


def test_points_lie_where_their_ticks_are() -> None:
    svg = lines([Line("a", [(0, 0.001), (1, 0.01), (2, 0.1)], 0), Line("plain", [(0, 0.05)], 0, faint=True)], "x", "y", log=True)
    (x0, y0, told), (x1, y1, _), (x2, y2, _) = circles(svg)
    # Equal steps on both axes, upwards.
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) and y0 - y1 == pytest.approx(y1 - y2, abs=0.2) and 0 < y2 < y0 < HEIGHT
    assert told == "a, 0: 0.001" and {"0.001", "0.01", "0.1", "x", "y", "a"} <= set(texts(svg)) and "plain" not in texts(svg)
    assert svg.count('class="line"') == 1 and svg.count('class="faint"') == 1


def test_a_narrow_logarithmic_axis_has_more_figures() -> None:
    assert {"0.002", "0.005", "0.01"} <= set(texts(lines([Line("a", [(0, 0.0015), (3, 0.02)], 0)], "x", "y", log=True)))


def test_a_linear_axis_begins_at_zero() -> None:
    svg = lines([Line("a", [(0, 4.0), (1, 8.0)], 1, connected=False)], "x", "y", x_ticks={0: "first"})
    (_, y0, _), (_, y1, _) = circles(svg)
    zero = HEIGHT - 46
    assert (zero - y1) == pytest.approx(2 * (zero - y0), abs=0.2)
    assert {"0", "2", "4", "6", "8", "first"} <= set(texts(svg)) and 'class="line"' not in svg and COLORS[1] in svg


def test_one_point_and_nothing_but_zeros() -> None:
    assert len(circles(lines([Line("a", [(7, 0.0)], 0)], "x", "y"))) == 1
    assert texts(bars({"a": 0.0}, "s")) == ["a", "0.000 s"]


def test_bars_are_as_long_as_they_say() -> None:
    svg = bars({"a": 1.0, "<b>": 2.5}, "MiB")
    rectangles = list(ElementTree.fromstring(svg).iter("rect"))
    assert [float(r.attrib["x"]) for r in rectangles] == [LABELS] * 2 and float(rectangles[1].attrib["y"]) == BAR + 4
    assert float(rectangles[1].attrib["width"]) == pytest.approx(2.5 * float(rectangles[0].attrib["width"]), abs=0.2)
    assert texts(svg) == ["a", "1.0 MiB", "<b>", "2.5 MiB"] and bars({}, "s").startswith("<svg")


def test_a_long_name_is_cut_in_the_middle() -> None:
    (name, _) = texts(bars({"a" * 30 + "b" * 30: 1.0}, "s"))
    assert name == "a" * 20 + "…" + "b" * 20
