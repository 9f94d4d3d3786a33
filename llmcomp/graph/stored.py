"""Layers whose weights are stored quantized: which formats hold them as they are, and their codes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmcomp.checkpoint.encoded import Encoded, Form, Lines
from llmcomp.graph.layer import Layer
from llmcomp.graph.model import ModelGraph

__all__ = ["Form", "Lines", "Stored", "stored_layers", "stored_lines", "stored_methods", "stored_order", "stored_second"]

ACROSS = "its groups run across the rows of the weight"
IN_PART = "only a part of it is stored so"
UNLIKE_ORDERS = "its parts have their columns in different orders of activations"
SECOND = ("nvfp4",)
"""Formats with one scale for all scales of a weight."""
UNLIKE = "its parts are held by different formats"


@dataclass(frozen=True)
class Stored:
    """How a layer is stored, and what it can be repacked into."""

    method: str
    forms: tuple[Form, ...] = ()
    """The smallest first."""
    reason: str = ""
    """Why there are none."""


@dataclass(frozen=True)
class _Run:
    """Neighbouring rows of a layer: lines of one tensor."""

    tensor: Encoded
    index: int | None
    start: int
    count: int


def stored_methods(graphs: Sequence[ModelGraph]) -> dict[str, int]:
    """Number of layers by the way they are stored in, those in float left out. Nothing is read."""
    found = Counter(_method(graph, layer) for graph in graphs for layer in graph.layers)
    return dict(sorted((method, count) for method, count in found.items() if method))


def _method(graph: ModelGraph, layer: Layer) -> str:
    tensors = map(graph.checkpoint.encoded, graph.sources[layer.name].tensors)
    return ", ".join(dict.fromkeys(tensor.method for tensor in tensors if tensor is not None))


def stored_layers(graphs: Sequence[ModelGraph]) -> dict[str, Stored]:
    """By name, the layers of which a part at least is stored quantized. Scales and zero points are read, codes are not."""
    found = {}
    for graph, layer in ((one, layer) for one in graphs for layer in one.layers):
        tensors = [graph.checkpoint.encoded(name) for name in graph.sources[layer.name].tensors]
        known = [tensor for tensor in tensors if tensor is not None]
        if known:
            method, whole = _method(graph, layer), len(known) == len(tensors)
            found[layer.name] = _common(graph, layer, method, known) if whole else Stored(method, reason=IN_PART)
    return found


def stored_order(graph: ModelGraph, layer: Layer) -> NDArray[np.int64]:
    """The order in which the columns of a layer come in its sorted forms."""
    return next(_runs(graph, layer)).tensor.order


def stored_second(graph: ModelGraph, layer: Layer) -> float:
    """What all scales of a layer have been multiplied by."""
    return next(_runs(graph, layer)).tensor.second


def stored_lines(graph: ModelGraph, layer: Layer, form: Form, start: int, stop: int) -> Lines:
    """Rows [start, stop) of a layer, leading axes flattened, in the codes of one of its forms."""
    parts, row = [], 0
    for run in _runs(graph, layer):
        low, high = max(start - row, 0), min(stop - row, run.count)
        if low < high:
            parts.append(run.tensor.lines(form, run.index, run.start + low, run.start + high))
        row += run.count
    if len(parts) == 1:
        return parts[0]
    zeros = [part.zero_point for part in parts if part.zero_point is not None]
    return Lines(
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.scale for part in parts]),
        np.concatenate(zeros) if zeros else None,
    )


def _common(graph: ModelGraph, layer: Layer, method: str, tensors: list[Encoded]) -> Stored:
    """The forms that all tensors of a layer have."""
    for tensor in tensors:
        if not tensor.held.forms:
            return Stored(method, reason=tensor.held.reason)
        if tensor.held.forms[0].sorted and len(tensors) > 1:
            return Stored(method, reason=UNLIKE_ORDERS)
    if not _runs_along(graph, layer, tensors):
        return Stored(method, reason=ACROSS)
    wide: dict[tuple[str, int], Form] = {}
    for form in (form for tensor in tensors for form in tensor.held.forms):
        kind = form.format, form.group_size
        wide[kind] = form if form.scale_type == "f32" else wide.get(kind, form)
    kinds = [{(form.format, form.group_size) for form in tensor.held.forms} for tensor in tensors]
    one_second = len({tensor.second for tensor in tensors}) == 1
    forms = tuple(form for kind, form in wide.items() if all(kind in one for one in kinds) and (one_second or form.format not in SECOND))
    return Stored(method, forms, "" if forms else UNLIKE)


def _runs_along(graph: ModelGraph, layer: Layer, tensors: list[Encoded]) -> bool:
    """Whether rows of the layer are lines of its tensors."""
    pieces = graph.sources[layer.name].pieces
    assert pieces is not None
    (turned, *others) = {piece.transposed != layer.transposed for matrix in pieces.matrices for piece in matrix}
    if others or {tensor.crosswise for tensor in tensors} != {turned}:
        return False
    if not layer.transposed:
        return True
    # Pieces stand beside each other along the rows then: a row is a whole line only of a matrix in one piece.
    width = layer.shape[-1]
    return all(len(matrix) == 1 and (matrix[0].start, matrix[0].rows) == (0, width) for matrix in pieces.matrices)


def _runs(graph: ModelGraph, layer: Layer) -> Iterator[_Run]:
    pieces = graph.sources[layer.name].pieces
    assert pieces is not None
    assert layer.name not in graph.orders
    for matrix in pieces.matrices:
        for piece in matrix:
            tensor = graph.checkpoint.encoded(piece.tensor)
            assert tensor is not None
            yield _Run(tensor, piece.index, *((0, layer.shape[-2]) if layer.transposed else (piece.start, piece.rows)))
