"""Plots of a report are read back as XML: what is drawn where."""

from __future__ import annotations

from typing import Any

import pytest

from llmcomp.pages.plots import COLORS
from llmcomp.writing import report_plots
from tests.pages.svg import dashes, marks, texts, widths


def layer(name: str, error: float = 0.01, plain: float | None = 0.02, size: int = 64, **more: Any) -> dict[str, Any]:
    calibration = {"loss": error / 2, "plain_loss": plain}
    given = {"name": name, "relative_error": error, "plain_error": plain, "shape": [size, size], "bytes": size * size // 2}
    return {**given, "format": "int4_sym", "group_size": 64, "calibration": calibration, **more}


def test_a_line_for_each_kind_and_a_point_for_each_block() -> None:
    layers = [
        *(layer(f"m.{i}.up", error, 2 * error) for i, error in enumerate((1e-3, 1e-2, 1e-1))),
        *(layer(f"m.{i}.down", 0.05, None) for i in (0, 2)),
        layer("head", 0.9),
        layer("m.1.down", 0.0),
    ]
    svg = report_plots.errors(layers)
    assert svg is not None
    (x0, y0), (x1, y1), (x2, y2), _ = marks(svg, COLORS[0])
    # The SVG has six decimals.
    assert x1 - x0 == pytest.approx(x2 - x1, abs=1e-4) and y0 - y1 == pytest.approx(y1 - y2, abs=1e-4) and y0 > y1
    down = marks(svg, COLORS[1])
    assert [x for x, _ in down[:2]] == [x0, x2] and len(down) == 3 and y1 > down[0][1] == down[1][1] > y2
    assert dashes(svg, COLORS[0]) == 1 and dashes(svg, COLORS[1]) == 0
    assert {"m.*.up", "m.*.down", "0.001", "0.1", "0", "1", "2", "number of the decoder block"} <= set(texts(svg))


def test_losses_are_those_of_the_outputs() -> None:
    svg = report_plots.losses([layer("m.0.up", 0.02, 0.04), layer("m.1.up", 0.02, 0.04)])
    assert svg is not None and "error of the outputs (log scale)" in texts(svg) and "0.01" in texts(svg)


def test_the_kinds_with_most_weights_have_lines() -> None:
    svg = report_plots.errors([layer(f"m.0.k{i}", size=10 + i) for i in range(report_plots.KINDS + 1)])
    assert svg is not None and "m.*.k0" not in texts(svg) and {f"m.*.k{i + 1}" for i in range(report_plots.KINDS)} <= set(texts(svg))


@pytest.mark.parametrize("blocks", [1, 600])
def test_models_of_one_block_and_of_many(blocks: int) -> None:
    layers = [layer(f"m.{i}.up") for i in range(blocks)]
    for svg in (report_plots.errors(layers), report_plots.losses(layers), report_plots.bits(layers)):
        # With the one of the legend.
        assert svg is not None and len(marks(svg, COLORS[0])) == blocks + 1
        numbers = {text for text in texts(svg) if text.isdecimal()}
        assert "0" in numbers and len(numbers) <= 20


def test_plain_rounding_of_a_single_block_is_seen() -> None:
    for plain, lines in ((0.02, 1), (None, 0)):
        svg = report_plots.errors([layer("m.0.up", plain=plain)])
        assert svg is not None and dashes(svg, COLORS[0]) == lines


def test_bits_begin_at_zero() -> None:
    layers = [layer("embed", format="int8", group_size=-1, bytes=64 * 64), *(layer(f"m.{i}.up") for i in range(2))]
    svg = report_plots.bits(layers)
    assert svg is not None
    (_, eight), _ = marks(svg, COLORS[0])
    (_, four), (_, same), _ = marks(svg, COLORS[1])
    # The lowest tick.
    zero = max(y for _, y in marks(svg, "currentColor"))
    assert zero - eight == pytest.approx(2 * (zero - four), abs=1e-4) and same == four
    assert {"int8", "int4_sym, groups of 64", "0", "8", "bits per weight"} <= set(texts(svg))


def test_bars_are_as_long_as_they_say() -> None:
    svg = report_plots.seconds({"a": 1.0, "<b>": 2500.0, "c": 0.0})
    assert svg is not None
    one, two, none = widths(svg, COLORS[0])
    assert two == pytest.approx(2500 * one, abs=0.01) and none == 0
    assert texts(svg) == ["a", "<b>", "c", "1.0 s", "2,500.0 s", "0.000 s"]
    formats = [{"format": "nf4", "group_size": 64, "bytes": 3 << 20}]
    told = report_plots.bytes_by_format(formats, 1 << 20)
    assert told is not None and texts(told) == ["nf4, groups of 64", "all else", "3.0 MiB", "1.0 MiB"]


def test_nothing_to_draw() -> None:
    assert report_plots.errors([layer("head")]) is None and report_plots.errors([layer("m.0.up", 0.0)]) is None
    assert report_plots.losses([]) is None and report_plots.bits([]) is None and report_plots.seconds({}) is None
    all_zero = report_plots.seconds({"a": 0.0})
    assert all_zero is not None and texts(all_zero) == ["a", "0.000 s"]
