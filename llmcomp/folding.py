"""Folding, the stage between the plan and the layout: factors for every fold in front of a low-bit layer.

comes in: a graph, a plan
goes out: the folds that the plan asks for, and Factors for them
may import: algorithms, graph, planning
read first: this file, then graph/folds.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp import planning
from llmcomp.algorithms import equalize
from llmcomp.graph.factors import Factors, make_factors
from llmcomp.graph.folds import Fold, find_folds
from llmcomp.graph.layer import Layer
from llmcomp.graph.model import ModelGraph, flat_rows
from llmcomp.planning import Plan

SAMPLED_ROWS, SAMPLED_RUN = 256, 32
"""Rows from which the magnitudes of a layer's columns are taken, and how many of them are read together."""


def choose_folds(graph: ModelGraph, plan: Plan, found: Sequence[Fold] | None = None) -> tuple[Fold, ...]:
    """The folds in front of low-bit layers, none if `plan.folds` says so; no weight is read. `found` are all that the graph has, if known.

    Factors that need a product at run time are only taken where data chooses them. A fold that touches a layer which is float, or keeps the
    codes of the source, is left out: its weights could not take a factor without being rounded.
    """
    if plan.folds == "none":
        return ()
    schemes = plan.schemes

    def helps(one: Fold) -> bool:
        involved = [*one.readers, *([one.writer] if one.writer else [])]
        if any(schemes[name].is_float or schemes[name].is_stored for name in involved):
            return False
        return any(planning.is_low(schemes[name].format) for name in one.readers)

    return tuple(one for one in (find_folds(graph, plan.folds == "awq") if found is None else found) if helps(one))


def fold(graph: ModelGraph, plan: Plan, folds: tuple[Fold, ...], workers: int = 1) -> tuple[Factors, list[dict[str, Any]]]:
    """The factors of `folds`, and a line for the report on each."""
    schemes, layers = plan.schemes, {layer.name: layer for layer in graph.layers}
    low = [[name for name in one.readers if planning.is_low(schemes[name].format)] for one in folds]
    names = [name for readers in low for name in readers]
    with ThreadPoolExecutor(workers, "llmcomp-fold") as pool:
        sums = dict(zip(names, pool.map(lambda name: equalize.magnitudes(sampled_rows(graph, layers[name])), names), strict=True))
    chosen: list[NDArray[np.float32]] = []
    told: list[dict[str, Any]] = []
    for one, readers in zip(folds, low, strict=True):
        chosen.append(equalize.channel_factors(one.channels, [(*sums[name], one.readers[name]) for name in readers], one.free))
        told.append({"from": one.source, "into": list(one.readers), "channels": int(one.free.sum())})
    return make_factors(graph, chosen, folds), told


def sampled_rows(graph: ModelGraph, layer: Layer) -> Iterator[NDArray[Any]]:
    """Evenly spaced runs of rows of a layer, enough for the statistics of its columns."""
    rows = flat_rows(layer)
    runs = -(-min(SAMPLED_ROWS, rows) // SAMPLED_RUN)
    starts = sorted({i * rows // runs for i in range(runs)})
    return (graph.rows(layer, start, min(start + SAMPLED_RUN, rows)) for start in starts)
