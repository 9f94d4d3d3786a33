"""The plots of a report; each is SVG, or None where there is nothing to draw."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from llmcomp.pages.chart import COLORS, Line, bars, lines

Layers = Sequence[Mapping[str, Any]]
Values = Callable[[Mapping[str, Any]], tuple[float, float | None]]
KINDS = len(COLORS)
"""Kinds of layers that have a line; those with fewer weights have none."""
NUMBER = re.compile(r"\.(\d+)\.")


def errors(layers: Layers) -> str | None:
    """Relative squared error of the weights by depth, a line for each kind of layer; dashed what plain rounding gives."""
    return _by_depth(layers, lambda x: (x["relative_error"], x["plain_error"]), "error of the weights")


def losses(layers: Layers) -> str | None:
    """The same of what layers lose of their outputs on the calibration data."""
    return _by_depth(layers, lambda x: (x["calibration"]["loss"], x["calibration"]["plain_loss"]), "error of the outputs")


def _by_depth(layers: Layers, values: Values, label: str) -> str | None:
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
    shown = {kind for kind, _ in weights.most_common(KINDS)}
    drawn: list[Line] = []
    for color, (kind, points) in enumerate((kind, sorted(points.items())) for kind, points in kinds.items() if kind in shown):
        plains = [(block, plain) for block, (_, plain) in points if plain]
        drawn += [Line(f"{kind} plain", plains, color, faint=True)] if plains else []
        drawn.append(Line(kind, [(block, value) for block, (value, _) in points], color))
    return lines(drawn, "number of the decoder block", f"{label}, relative", log=True) if drawn else None


def bits(layers: Layers) -> str | None:
    """Bits per weight of each layer, scales and zero points included, in the order of the model, a colour for each scheme."""
    schemes: dict[str, list[tuple[float, float]]] = {}
    starts: dict[str, int] = {}
    for i, layer in enumerate(layers):
        schemes.setdefault(scheme_name(layer), []).append((i, 8 * layer["bytes"] / prod(layer["shape"])))
        found = NUMBER.search(layer["name"])
        if found is not None:
            starts.setdefault(found[1], i)
    step = -(-len(starts) // 12) or 1
    ticks: dict[float, str] = {i: number for number, i in list(starts.items())[::step]}
    label = "layers in the order of the model" + (", by the number of the decoder block" if ticks else "")
    drawn = [Line(name, points, i, connected=False) for i, (name, points) in enumerate(schemes.items())]
    return lines(drawn, label, "bits per weight", x_ticks=ticks or None) if drawn else None


def bytes_by_format(formats: Sequence[Mapping[str, Any]], rest: int) -> str:
    """Bytes of the .bin for each format and group; `rest` are norms, tables and alignment."""
    return bars({**{scheme_name(f): f["bytes"] / 2**20 for f in formats}, "all else": rest / 2**20}, "MiB")


def seconds(stages: Mapping[str, float]) -> str:
    return bars(stages, "s")


def scheme_name(line: Mapping[str, Any]) -> str:
    """Of a layer, or of a line on a format."""
    return line["format"] + (f", groups of {line['group_size']}" if line["group_size"] > 0 else "")
