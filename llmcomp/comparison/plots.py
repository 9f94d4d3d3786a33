"""The plots of a comparison, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmcomp.pages.plots import cut, layer_ticks, legend, line_size, log_axis, mark, new_figure, style, svg

Model = Mapping[str, Any]

LONGEST = 60
"""Characters of a name in a legend."""
LOSSES = {"kl": "KL divergence to the reference\n(nats per token)", "perplexity": "perplexity"}


def size_against_loss(models: Sequence[Model], loss: str) -> str:
    """A point for each model, with its standard error; `loss` is kl or perplexity."""
    with style():
        figure, axes = new_figure(4.0, len(models))
        named = []
        for model in models:
            color, marker = _mark(model)
            x, y = model["bin_bytes"] / 2**20, model[loss]
            error = model[f"{loss}_standard_error"]
            point, *_ = axes.errorbar(x, y, yerr=error, color=color, marker=marker, markersize=7, capsize=4, linestyle="")
            named.append((point, _label(model)))
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
        legend(figure, named)
        return svg(figure, "sizes")


def layer_errors(models: Sequence[Model]) -> str:
    """A line for each model: its layers' relative errors, in the order of the model."""
    names = list(dict.fromkeys(layer["name"] for model in models for layer in model["layers"]))
    place = {name: i for i, name in enumerate(names)}
    with style():
        figure, axes = new_figure(4.4, len(models))
        named = []
        for model in models:
            color, marker = _mark(model)
            points = sorted((place[layer["name"]], layer["relative_error"]) for layer in model["layers"])
            (line,) = axes.plot(*zip(*points, strict=True), color=color, marker=marker, **line_size(len(points)))
            named.append((line, _label(model)))
        log_axis(axes, [layer["relative_error"] for model in models for layer in model["layers"]])
        layer_ticks(axes, names)
        axes.set_ylabel("relative squared error\nof the weights (log scale)")
        legend(figure, named)
        return svg(figure, "layers")


def _mark(model: Model) -> tuple[str, str]:
    """Colour and marker, the same in every plot."""
    return mark(int(model["number"]) - 1)


def _label(model: Model) -> str:
    return f"{model['number']}  {cut(model['label'], LONGEST)}"
