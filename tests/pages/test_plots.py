"""What plots share, read back from matplotlib's axes and from the SVG."""

from __future__ import annotations

import warnings
from itertools import pairwise

import matplotlib
import pytest

from llmcomp.pages import plots
from tests.pages.svg import marks, names, references, texts


def plot(name: str, label: str = "a") -> str:
    with plots.style():
        figure, axes = plots.new_figure(3, 1)
        (line,) = axes.plot([0, 1], [1, 2], color=plots.COLORS[0], marker="o")
        axes.fill_between([0, 1], [0, 0], [1, 1])
        plots.legend(figure, [(line, label)])
        return plots.svg(figure, name)


def test_names_of_two_plots_on_a_page_differ() -> None:
    one, two = plot("one"), plot("two")
    assert plot("one") == one and references(one) and references(one) <= set(names(one)) and references(two) <= set(names(two))
    assert len({*names(one), *names(two)}) == len(names(one)) + len(names(two))
    assert all(name.startswith("one-") for name in names(one))


@pytest.mark.parametrize("label", ["_$x_1$<b>&amp;", 'a id="patch_1" url(#x) href="#x" #010203', "模型"])
def test_text_stays_as_it_is(label: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        svg = plot("p", label)
    assert label in texts(svg) and "currentColor" in svg
    assert plots.INK not in svg.replace(label.replace('"', "&quot;"), "").replace(label, "")


def test_settings_of_the_process_do_not_count_and_stay() -> None:
    expected, filters = plot("p"), warnings.filters[:]
    with matplotlib.rc_context({"lines.linewidth": 9, "text.usetex": True, "svg.fonttype": "path", "font.size": 30}):
        before = dict(matplotlib.rcParams)
        assert plot("p") == expected and dict(matplotlib.rcParams) == before
        with pytest.raises(ZeroDivisionError), plots.style():
            raise ZeroDivisionError
        assert dict(matplotlib.rcParams) == before
    assert warnings.filters == filters


def test_points_lie_on_a_logarithmic_axis() -> None:
    with plots.style():
        figure, axes = plots.new_figure(3)
        axes.plot([0, 1, 2], [1e-3, 1e-2, 1e-1], color=plots.COLORS[1], marker="o")
        plots.log_axis(axes, [1e-3, 1e-1])
        svg = plots.svg(figure, "p")
    (x0, y0), (x1, y1), (x2, y2) = marks(svg, plots.COLORS[1])
    # Equal steps on both axes, upwards; the SVG has six decimals.
    assert x1 - x0 == pytest.approx(x2 - x1, abs=1e-4) and y0 - y1 == pytest.approx(y1 - y2, abs=1e-4) and y0 > y1
    assert {"0.001", "0.002", "0.005", "0.01", "0.1"} <= set(texts(svg))


@pytest.mark.parametrize(("low", "high"), [(5.5e-3, 5.5e-3), (1.01, 1.01), (3.3, 9.8), (9.9, 10.1), (0.02, 0.9), (1e-8, 1.0), (1e-12, 1e3)])
def test_a_logarithmic_axis_has_a_few_figures_on_any_range(low: float, high: float) -> None:
    with plots.style():
        figure, axes = plots.new_figure(3)
        axes.plot([0, 1], [low, high])
        plots.log_axis(axes, [low, high])
        figure.canvas.draw()
        bottom, top = axes.get_ylim()
        shown = [text for text in axes.get_yticklabels() if bottom <= text.get_position()[1] <= top]
        boxes = sorted(text.get_window_extent().extents.tolist()[1::2] for text in shown)
    assert bottom < low <= high < top and len(shown) >= 2
    assert all(below[1] <= above[0] for below, above in pairwise(boxes)), "labels overlap"


@pytest.mark.parametrize(("blocks", "shown"), [(1, ["0"]), (600, [str(i) for i in range(0, 600, 50)]), (0, [])])
def test_ticks_are_at_the_first_layer_of_a_block(blocks: int, shown: list[str]) -> None:
    layers = ["embed", *(f"layers.{i}.{kind}" for i in range(blocks) for kind in "qkv")]
    with plots.style():
        _, axes = plots.new_figure(3)
        plots.layer_ticks(axes, layers)
        if blocks:
            assert [text.get_text() for text in axes.get_xticklabels()] == shown
            assert [*axes.get_xticks()] == [1 + 3 * int(block) for block in shown]
        assert ("decoder block" in axes.get_xlabel()) == bool(blocks)


def test_a_long_name_is_cut_in_the_middle() -> None:
    assert plots.cut("a" * 30 + "b" * 30, 40) == "a" * 20 + "…" + "b" * 20 and plots.cut("a" * 40, 40) == "a" * 40


def test_marks_differ() -> None:
    assert len({plots.mark(i) for i in range(len(plots.COLORS) * len(plots.MARKERS))}) == 56
