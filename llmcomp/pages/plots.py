"""What plots of all pages share: their style, axes, legend, and how they become SVG in the page's text colour, whether it is light or dark.

Import it where a page is written: it loads matplotlib.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import log10
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

INK = "#010203"
"""Stands for the page's text colour while matplotlib draws."""
COLORS = ("#2f7fc1", "#d9691f", "#2a9d6f", "#c8527a", "#8a6fd1", "#a8862d", "#2f9faa", "#888888")
"""Told apart on white and on near-black."""
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
"""One fewer than colours, so that the pairs repeat late."""
STYLE: Any = {
    # Text stays text, which a reader can select and a page escapes; and none of it is a formula.
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.2,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "legend.frameon": False,
    **{f"{part}.color": INK for part in ("text", "xtick", "ytick", "grid")},
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
}
WIDTH, LEGEND_LINE = 9.5, 0.23
"""Of a figure, and the height of a line of its legend; in inches."""
TICKS = 12
NAMELESS = {"Creator": None, "Date": None, "Format": None, "Type": None}
MANY = 300
"""Points of a line from which on it and they are small."""
NUMBER = re.compile(r"\.(\d+)\.")
"""That of its decoder block in a layer's name."""


@contextmanager
def style() -> Iterator[None]:
    """In it figures are made and saved; the process's own settings of matplotlib neither change them nor are changed."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        # The reader's browser has the letters that matplotlib's font lacks.
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def new_figure(height: float, legend_lines: int = 0) -> tuple[Figure, Axes]:
    """One of `height` inches, and of the lines that its legend will have."""
    figure = Figure((WIDTH, height + LEGEND_LINE * legend_lines), layout="constrained")
    FigureCanvasSVG(figure)
    return figure, figure.subplots()


def mark(number: int) -> tuple[str, str]:
    """Colour and marker of the line or group of points of that number, from zero on."""
    return COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]


def line_size(points: int) -> dict[str, Any]:
    """Of a line with that many points, for Axes.plot."""
    return {"markersize": 4.5, "linewidth": 1} if points < MANY else {"markersize": 2.5, "linewidth": 0.5}


def cut(name: str, longest: int) -> str:
    """The name in at most about `longest` characters, without its middle."""
    return name if len(name) <= longest else name[: longest // 2] + "…" + name[-longest // 2 :]


def legend(figure: Figure, named: Sequence[tuple[Artist, str]], columns: int = 1) -> None:
    """Names of lines below the axes."""
    # matplotlib leaves out labels that begin with an underscore.
    figure.legend([artist for artist, _ in named], [f" {name}" for _, name in named], loc="outside lower left", ncols=columns)


def log_axis(axes: Axes, values: Sequence[float]) -> None:
    """The vertical axis logarithmic, over values above zero, with figures that people read."""
    low, high = min(values) / 1.12, max(values) * 1.12
    if high < 3 * low:
        # Two or more of the figures below lie in any such range.
        middle = (low * high) ** 0.5
        low, high = middle / 3**0.5, middle * 3**0.5
    decades = log10(high / low)
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(LogLocator(subs=range(1, 10) if decades < 1 else (1, 2, 5) if decades < 3 else (1,)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def layer_ticks(axes: Axes, names: Sequence[str]) -> None:
    """The horizontal axis of layers in the order of the model: a tick at the first layer of a decoder block, where the names tell blocks."""
    starts: dict[str, int] = {}
    for i, name in enumerate(names):
        block = NUMBER.search(name)
        if block:
            starts.setdefault(block[1], i)
    if not starts:
        axes.set_xlabel("layer, in the order of the model")
        return
    shown = list(starts.items())[:: -(-len(starts) // TICKS)]
    axes.set_xticks([i for _, i in shown], [block for block, _ in shown])
    axes.set_xlabel("layer, in the order of the model (number of its decoder block)")


def svg(figure: Figure, name: str) -> str:
    """The figure to be put into HTML; `name` is its own among the figures of a page."""
    out = io.StringIO()
    # The same in every run.
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(out, format="svg", metadata=NAMELESS)
    drawn = out.getvalue()

    def fit(tag: re.Match[str]) -> str:
        # Without the groups' names, which nothing refers to; the names of marks and clips are among all those of the page.
        text = re.sub(r' id="(?!C\d)[\w.]+_\d+"', "", tag[0])
        return re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{name}-", text).replace(INK, "currentColor")

    # Without the XML prologue. A text has no "<" of its own and stays as it is.
    return re.sub("<[^>]+>", fit, drawn[drawn.index("<svg") :])
