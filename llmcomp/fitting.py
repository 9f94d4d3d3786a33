"""Fitting, the stage that makes tables of levels for the layers whose format is `adaptive_codebook`.

comes in: a graph, schemes, factors, second moments where they are known
goes out: for each such layer the name of its codebook, which takes as many bytes as the plan says whatever its levels are
may import: algorithms, formats, graph, planning
read first: fit_tables
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.algorithms.adaptive_codebook import adaptive_codebook
from llmcomp.formats import ADAPTIVE
from llmcomp.formats.codebook import make_codebook
from llmcomp.graph.factors import Factors
from llmcomp.graph.layer import Layer
from llmcomp.graph.model import BLOCK, ModelGraph, flat_rows
from llmcomp.planning import Scheme

SAMPLED_ROWS = 64
"""Rows of each weight that levels are fitted to: 16 levels of 36864 weights and more, where a row has 576."""


def fit_table(scheme: Scheme, tensors: Sequence[tuple[NDArray[np.float32], NDArray[Any] | None]]) -> str:
    """Name of the codebook for weights [rows, in], factors in them, each with the second moments [in] of its inputs or None."""
    picked = [(np.ascontiguousarray(w[_spread(len(w))]), h) for w, h in tensors]
    return make_codebook(adaptive_codebook(picked, scheme.group_size).levels, fitted=True).name


def fit_tables(
    graph: ModelGraph,
    schemes: Mapping[str, Scheme],
    layers: Sequence[Layer],
    factors: Factors,
    across_blocks: bool,
    moments: Mapping[str, NDArray[np.float32]] | None = None,
    workers: int = 1,
) -> dict[str, str]:
    """Layer name -> name of its codebook, for those of `layers` that want one.

    Across blocks, layers whose names differ by the number of their block alone, and whose groups are alike, share one. `moments` are of the
    inputs as they are without the factors.
    """
    pools: dict[tuple[str, int], list[Layer]] = {}
    for layer in layers:
        if schemes[layer.name].format == ADAPTIVE:
            role = BLOCK.sub("*", layer.name + ".") if across_blocks else layer.name
            pools.setdefault((role, schemes[layer.name].group_size), []).append(layer)

    def fit(pool: Sequence[Layer]) -> str:
        tensors = [_sample(graph, layer, factors, (moments or {}).get(layer.name)) for layer in pool]
        return fit_table(schemes[pool[0].name], tensors)

    with ThreadPoolExecutor(workers, "llmcomp-fit") as pool:
        names = list(pool.map(fit, pools.values()))
    return {layer.name: name for layers, name in zip(pools.values(), names, strict=True) for layer in layers}


def _sample(
    graph: ModelGraph, layer: Layer, factors: Factors, moments: NDArray[np.float32] | None
) -> tuple[NDArray[np.float32], NDArray[Any] | None]:
    numbers = _spread(flat_rows(layer)).tolist()
    rows = np.concatenate([np.asarray(graph.rows(layer, i, i + 1), np.float32) for i in numbers])
    seen = moments if moments is None else moments / np.square(factors.columns.get(layer.name, np.float32(1)))
    return factors.apply(layer.name, rows, numbers), seen


def _spread(rows: int) -> NDArray[np.int64]:
    """Evenly spaced rows."""
    return np.unique(np.linspace(0, rows - 1, min(rows, SAMPLED_ROWS)).astype(np.int64))
