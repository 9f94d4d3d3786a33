"""The page's plots, as SVG to be put into HTML: they take the page's text colour, whether it is light or dark."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

Model = Mapping[str, Any]

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
LONGEST = 60
"""Characters of a name in a legend."""
TICKS = 12
LOSSES = {"kl": "KL divergence to the reference\n(nats per token)", "perplexity": "perplexity"}


def size_against_loss(models: Sequence[Model], loss: str) -> str:
    """A point for each model, with its standard error; `loss` is kl or perplexity."""
    with _style("sizes"):
        figure, axes = _figure(4.0, len(models))
        for model in models:
            color, marker = _mark(model)
            x, y = model["bin_bytes"] / 2**20, model[loss]
            axes.errorbar(
                x,
                y,
                yerr=model[f"{loss}_standard_error"],
                color=color,
                marker=marker,
                markersize=7,
                capsize=4,
                linestyle="",
                label=_label(model),
            )
            axes.annotate(model["number"], (x, y), (8, 6), textcoords="offset points")
        axes.margins(y=0.15)
        sizes = [model["bin_bytes"] / 2**20 for model in models]
        # Room for the numbers; and sizes that are almost the same shall look so.
        room = max(0.15 * (max(sizes) - min(sizes)), 0.05 * max(sizes))
        axes.set_xlim(min(sizes) - room, max(sizes) + room)
        if loss == "kl":
            axes.set_ylim(bottom=0)
        axes.ticklabel_format(useOffset=False)
        axes.set_xlabel("size of openvino_model.bin (MiB)")
        axes.set_ylabel(LOSSES[loss])
        return _svg(figure)


def layer_errors(models: Sequence[Model]) -> str:
    """A line for each model: its layers' relative errors, in the order of the model."""
    names = list(dict.fromkeys(layer["name"] for model in models for layer in model["layers"]))
    place = {name: i for i, name in enumerate(names)}
    with _style("layers"):
        figure, axes = _figure(4.4, len(models))
        for model in models:
            color, marker = _mark(model)
            points = sorted((place[layer["name"]], layer["relative_error"]) for layer in model["layers"])
            axes.plot(*zip(*points, strict=True), color=color, marker=marker, markersize=3, linewidth=0.8, label=_label(model))
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        _block_ticks(axes, names)
        axes.set_ylabel("relative squared error\nof the weights (log scale)")
        return _svg(figure)


def _style(plot: str) -> AbstractContextManager[None]:
    """The salt makes the names of marks and clips the same in every run, and others in each plot of a page."""
    return matplotlib.rc_context({**STYLE, "svg.hashsalt": plot})


def _block_ticks(axes: Axes, names: Sequence[str]) -> None:
    """A tick at the first layer of a decoder block, where the names tell blocks."""
    starts: dict[str, int] = {}
    for i, name in enumerate(names):
        block = re.search(r"\.(\d+)\.", name)
        if block:
            starts.setdefault(block[1], i)
    if not starts:
        axes.set_xlabel("layer, in the order of the model")
        return
    shown = list(starts.items())[:: -(-len(starts) // TICKS)]
    axes.set_xticks([i for _, i in shown], [block for block, _ in shown])
    axes.set_xlabel("layer, in the order of the model (number of its decoder block)")


def _figure(height: float, models: int) -> tuple[Figure, Axes]:
    """One of `height` inches and a line of the legend for each model."""
    figure = Figure((9.5, height + 0.23 * models), layout="constrained")
    FigureCanvasSVG(figure)
    return figure, figure.subplots()


def _mark(model: Model) -> tuple[str, str]:
    """Colour and marker, the same in every plot."""
    i = int(model["number"]) - 1
    return COLORS[i % len(COLORS)], MARKERS[i % len(MARKERS)]


def _label(model: Model) -> str:
    # The number first: matplotlib hides labels that begin with an underscore.
    name = model["label"]
    return f"{model['number']}  {name if len(name) <= LONGEST else name[: LONGEST // 2] + '…' + name[-LONGEST // 2 :]}"


def _svg(figure: Figure) -> str:
    figure.legend(loc="outside lower left", ncols=1)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Creator": None, "Date": None, "Format": None, "Type": None})
    svg = out.getvalue()
    # Without the XML prologue, and without the groups' names, which the other plot has too.
    svg = re.sub(r' id="(?!C\d)[\w.]+_\d+"', "", svg[svg.index("<svg") :])
    return svg.replace(INK, "currentColor")
