"""Weights that are no numbers are refused by name and place."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.errors import NonFiniteWeightError
from llmcomp.graph.layer import Layer
from llmcomp.graph.model import ModelGraph, flat_rows
from llmcomp.planning.scheme import SOURCE_TYPES

DAMAGED = "The checkpoint is damaged or its training diverged; get a good copy"

NonFinite = Callable[[NDArray[Any]], tuple[int, int | None]]
"""rows -> (number of NaN and Inf, flat index of the first)."""


def check_kept(graph: ModelGraph, non_finite: NonFinite) -> None:
    """The tensors that stay in the graph at full precision (norms, biases, tables) are finite; the others are checked as they stream.

    Raises:
        NonFiniteWeightError: one holds NaN or Inf.
    """
    for name in graph.skeleton.real:
        info = graph.checkpoint.tensors[name]
        if info.dtype not in SOURCE_TYPES:
            continue
        count, first = non_finite(graph.checkpoint.read(name))
        if count:
            raise NonFiniteWeightError(name, f"{count} of {prod(info.shape)} values are NaN or Inf, the first at index {first}", DAMAGED)


def empty_layers(graph: ModelGraph) -> list[str]:
    """Tensors of layers whose first, middle and last rows are zero altogether, as a download that broke off leaves them."""
    found = []
    for layer in graph.layers:
        last = flat_rows(layer) - 1
        if not any(np.any(graph.stored_rows(layer, row, row + 1)) for row in sorted({0, last // 2, last}, reverse=True)):
            found.append(layer.tensor)
    return found


def non_finite_error(graph: ModelGraph, layer: Layer, non_finite: NonFinite, step: int) -> NonFiniteWeightError:
    """What to raise for a layer that holds NaN or Inf, read in `step` rows at a time."""
    count, first = 0, None
    for start in range(0, flat_rows(layer), step):
        found, index = non_finite(graph.stored_rows(layer, start, min(start + step, flat_rows(layer))))
        if found and first is None and index is not None:
            first = start * layer.shape[-1] + index
        count += found
    position = tuple(int(i) for i in np.unravel_index(first or 0, (flat_rows(layer), layer.shape[-1])))
    return NonFiniteWeightError(
        layer.tensor,
        f"{count} of {layer.size} values are NaN or Inf, the first at row {position[0]}, column {position[1]}",
        DAMAGED,
    )
