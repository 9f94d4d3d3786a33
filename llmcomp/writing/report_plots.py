"""The plots of a report; each is SVG, or None where there is nothing to draw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from matplotlib.ticker import MaxNLocator

from llmcomp.pages.plots import COLORS, NUMBER, cut, layer_ticks, legend, line_size, log_axis, mark, new_figure, style, svg

Layers = Sequence[Mapping[str, Any]]
Values = Callable[[Mapping[str, Any]], tuple[float, float | None]]
KINDS = len(COLORS)
"""Kinds of layers that have a line; those with fewer weights have none."""
COLUMNS, LONGEST = 2, 44
"""Of the legend; characters of a name in it."""
BAR = 0.3
"""Height in inches, with the gap."""


def errors(layers: Layers) -> str | None:
    """Relative squared error of the weights by depth, a line for each kind of layer; dashed what plain rounding gives."""
    return _by_depth(layers, lambda x: (x["relative_error"], x["plain_error"]), "error of the weights", "errors")


def losses(layers: Layers) -> str | None:
    """The same of what layers lose of their outputs on the calibration data."""
    return _by_depth(layers, lambda x: (x["calibration"]["loss"], x["calibration"]["plain_loss"]), "error of the outputs", "losses")


def _by_depth(layers: Layers, values: Values, label: str, plot: str) -> str | None:
    kinds: dict[str, dict[int, tuple[float, float | None]]] = {}
    weights: Counter[str] = Counter()
    for layer in layers:
        found = NUMBER.search(layer["name"])
        value, plain = values(layer)
        # A float layer has no error, and one of zeros none that a logarithm can show.
        if found is not None and value:
            kind = layer["name"][: found.start()] + ".*." + layer["name"][found.end() :]
            kinds.setdefault(kind, {})[int(found[1])] = (value, plain)
            weights[kind] += prod(layer["shape"])
    if not kinds:
        return None
    shown = {kind for kind, _ in weights.most_common(KINDS)}
    drawn = {kind: sorted(points.items()) for kind, points in kinds.items() if kind in shown}
    blocks = [block for points in drawn.values() for block, _ in points]
    room = max(0.5, 0.02 * (max(blocks) - min(blocks)))
    with style():
        figure, axes = new_figure(3.6, -(-len(drawn) // COLUMNS))
        named, size = [], line_size(len(blocks) // len(drawn))
        for i, (kind, points) in enumerate(drawn.items()):
            color, marker = mark(i)
            plains: list[tuple[float, float]] = [(block, plain) for block, (_, plain) in points if plain]
            if len(plains) == 1:
                # A line of one point cannot be seen.
                plains = [(x, plains[0][1]) for x in (plains[0][0] - room / 3, plains[0][0] + room / 3)]
            if plains:
                axes.plot(*zip(*plains, strict=True), color=color, linestyle="--", linewidth=size["linewidth"], alpha=0.8)
            solid = [(block, value) for block, (value, _) in points]
            (line,) = axes.plot(*zip(*solid, strict=True), color=color, marker=marker, **size)
            named.append((line, cut(kind, LONGEST)))
        log_axis(axes, [value for points in drawn.values() for _, pair in points for value in pair if value])
        axes.set_xlim(min(blocks) - room, max(blocks) + room)
        axes.xaxis.set_major_locator(MaxNLocator(12, integer=True, min_n_ticks=1))
        axes.set_xlabel("number of the decoder block")
        axes.set_ylabel(f"relative squared\n{label} (log scale)")
        legend(figure, named, COLUMNS)
        return svg(figure, plot)


def bits(layers: Layers) -> str | None:
    """Bits per weight of each layer, scales and zero points included, in the order of the model, a colour for each scheme."""
    schemes: dict[str, list[tuple[int, float]]] = {}
    for i, layer in enumerate(layers):
        schemes.setdefault(scheme_name(layer), []).append((i, 8 * layer["bytes"] / prod(layer["shape"])))
    if not schemes:
        return None
    with style():
        figure, axes = new_figure(3.2, -(-len(schemes) // COLUMNS))
        named = []
        for i, (name, points) in enumerate(schemes.items()):
            color, marker = mark(i)
            (line,) = axes.plot(*zip(*points, strict=True), color=color, marker=marker, linestyle="", **line_size(len(layers)))
            named.append((line, cut(name, LONGEST)))
        axes.set_ylim(0, 1.08 * max(value for points in schemes.values() for _, value in points) or 1)
        axes.xaxis.set_major_locator(MaxNLocator(12, integer=True, min_n_ticks=1))
        layer_ticks(axes, [layer["name"] for layer in layers])
        axes.set_ylabel("bits per weight")
        legend(figure, named, COLUMNS)
        return svg(figure, "bits")


def bytes_by_format(formats: Sequence[Mapping[str, Any]], rest: int) -> str | None:
    """Bytes of the .bin for each format and group; `rest` are norms, tables and alignment."""
    return _bars({**{scheme_name(f): f["bytes"] / 2**20 for f in formats}, "all else": rest / 2**20}, "MiB", "bytes")


def seconds(stages: Mapping[str, float]) -> str | None:
    return _bars(stages, "s", "seconds")


def _bars(values: Mapping[str, float], unit: str, plot: str) -> str | None:
    """A bar with its figure for each name."""
    if not values:
        return None
    with style():
        figure, axes = new_figure(BAR * (len(values) + 1))
        drawn = axes.barh(range(len(values)), [*values.values()], height=0.65, color=COLORS[0])
        axes.bar_label(drawn, [f"{value:,.{1 if value >= 1 else 3}f} {unit}" for value in values.values()], padding=6)
        axes.set_yticks(range(len(values)), [cut(name, LONGEST) for name in values])
        axes.set_ylim(len(values) - 0.5, -0.5)
        axes.set_xlim(0, 1.2 * max(values.values()) or 1)
        axes.xaxis.set_visible(False)
        axes.tick_params(length=0)
        axes.grid(False)
        axes.spines[:].set_visible(False)
        return svg(figure, plot)


def scheme_name(line: Mapping[str, Any]) -> str:
    """Of a layer, or of a line on a format."""
    return line["format"] + (f", groups of {line['group_size']}" if line["group_size"] > 0 else "")
