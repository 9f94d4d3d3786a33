"""ModelGraph: the skeleton's IR together with the checkpoint that its weights come from."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.checkpoint import Checkpoint
from llmcomp.errors import ArchitectureError
from llmcomp.graph.ir import IR
from llmcomp.graph.layer import Layer
from llmcomp.graph.pieces import Pieces
from llmcomp.graph.skeleton import Skeleton

BLOCK = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d+)\.")
FLOAT_TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
LANGUAGE = {f"openvino_{name}model" for name in ("", "language_", "text_embeddings_", "encoder_", "decoder_", "decoder_with_past_")}
"""Submodels, as the exporter names them, that are made of a text model's layers, or hear; all others are made for vision."""
PIXELS = "pixel_values"
"""Input of what sees."""
MATRIX_BYTES = 1 << 16
"""A constant of the skeleton's own .bin counts as a weight from this size on; smaller ones are tables and masks."""


@dataclass(frozen=True)
class Source:
    """Where the values of a layer are: in checkpoint tensors, or a range of skeleton.bin."""

    layer_id: int
    """Id of the Parameter or Const in the skeleton's IR."""
    pieces: Pieces | None
    offset: int = 0

    @property
    def tensors(self) -> tuple[str, ...]:
        """Of the checkpoint."""
        return self.pieces.tensors if self.pieces else ()


@dataclass(frozen=True)
class Order:
    """Places that rows and columns of a matrix come from; None where they are as stored."""

    rows: NDArray[np.int64] | None = None
    """[out]"""
    columns: NDArray[np.int64] | None = None
    """[in]"""


AS_STORED = Order()


class ModelGraph:
    """Layers in topological order and their rows, read lazily.

    `layers` are the weights that a MatMul or a Gather reads as a matrix; everything else stays in skeleton.bin as it is.
    """

    def __init__(self, skeleton: Skeleton, checkpoint: Checkpoint, taken: Collection[str] = ()) -> None:
        """`taken` are names of layers in other submodels."""
        self.skeleton, self.checkpoint, self._taken = skeleton, checkpoint, frozenset(taken)
        self.ir = IR.read(skeleton.xml)
        self._vision = skeleton.name not in LANGUAGE or any(self.ir.name(number) == PIXELS for number in self.ir.layers)
        self._bin = np.memmap(skeleton.bin, np.uint8, "r") if skeleton.bin.stat().st_size else np.zeros(0, np.uint8)
        self.sources: dict[str, Source] = {}
        self.layers = tuple(self._find_layers())
        self.orders: Mapping[str, Order] = {}
        """Layer name -> in which order `rows` gives a matrix."""
        self.vector_orders: Mapping[int, NDArray[np.int64]] = {}
        """Const layer of f32 -> in which order `constant_bytes` gives it."""

    def reordered(self, orders: Mapping[str, Order], vectors: Mapping[int, NDArray[np.int64]]) -> ModelGraph:
        """This graph with some of its matrices and constants in another order than it has them now."""
        new = copy.copy(self)
        new.orders = {**self.orders, **{name: _joined(self.orders.get(name, AS_STORED), order) for name, order in orders.items()}}
        new.vector_orders = {**self.vector_orders, **{number: _behind(self.vector_orders.get(number), o) for number, o in vectors.items()}}
        return new

    def matmuls(self) -> dict[int, Layer]:
        """MatMul of the IR -> the layer that it reads."""
        readers = {layer.name: self.weight_readers(self.sources[layer.name].layer_id) for layer in self.layers}
        return {number: x for x in self.layers for number, _ in readers[x.name] if self.ir.kind(number) == "MatMul"}

    @property
    def used(self) -> set[str]:
        """Checkpoint tensors that the graph is made of; of several submodels this knows the real ones of all."""
        return {tensor for source in self.sources.values() for tensor in source.tensors} | set(self.skeleton.real)

    @property
    def elements(self) -> int:
        """Numbers in the checkpoint's tensors that the graph is made of, norms and biases among them."""
        used = self.used
        return sum(prod(tensor.shape) for name, tensor in self.checkpoint.tensors.items() if name in used)

    @property
    def vocabulary(self) -> int:
        """Rows of the first embedding table; 0 without one."""
        return next((layer.shape[0] for layer in self.layers if "Gather" in layer.ops), 0)

    def rows(self, layer: Layer, start: int, stop: int) -> NDArray[np.generic]:
        """Rows [start, stop) of the (out, in) matrix in the source's type; leading axes of a stack are flattened into rows."""
        order = self.orders.get(layer.name, AS_STORED)
        w = self._stored(layer, slice(start, stop) if order.rows is None else order.rows[start:stop])
        if order.columns is None:
            return w
        # Raw numbers: numpy gathers a type that is not its own element by element.
        return np.take(w.view(np.uint16) if w.dtype.itemsize == 2 else w, order.columns, axis=1).view(w.dtype)

    def stored_rows(self, layer: Layer, start: int, stop: int) -> NDArray[np.generic]:
        """As `rows`, in the source's order."""
        return self._stored(layer, slice(start, stop))

    def _stored(self, layer: Layer, rows: slice | NDArray[np.int64]) -> NDArray[np.generic]:
        source = self.sources[layer.name]
        if source.pieces is not None:
            if isinstance(rows, slice):
                start, stop, _ = rows.indices(flat_rows(layer))
                if layer.transposed:
                    return source.pieces.columns(self.checkpoint, start, stop, layer.shape[-2])
                return source.pieces.read(self.checkpoint, start, stop)
            whole = source.pieces.whole
            if whole is not None and not layer.transposed:
                return self.checkpoint.picked(whole, rows)
            return self._stored(layer, slice(0, flat_rows(layer)))[rows]
        stored = self._constant(source, layer)
        if not layer.transposed:
            return stored.reshape(-1, layer.shape[-1])[rows]
        # Row r of the stack is column r % out of matrix r // out.
        row = np.arange(flat_rows(layer))[rows]
        return np.ascontiguousarray(stored[row // layer.shape[-2], :, row % layer.shape[-2]])

    def prefetch(self, layer: Layer, start: int, stop: int) -> None:
        """Ask the system to read rows [start, stop) ahead."""
        pieces = self.sources[layer.name].pieces
        if pieces is None or layer.transposed:
            return
        if self.orders.get(layer.name, AS_STORED).rows is None:
            pieces.prefetch(self.checkpoint, start, stop)
        elif start == 0:
            # The rows of each tile are all over the tensor.
            pieces.prefetch(self.checkpoint, 0, flat_rows(layer))

    def _constant(self, source: Source, layer: Layer) -> NDArray[np.generic]:
        """A constant of skeleton.bin as it is stored, [matrices, rows, columns]."""
        import ml_dtypes

        kind = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}[layer.dtype]
        flat = self._bin[source.offset : source.offset + layer.size * kind.itemsize].view(kind)
        out, width = layer.shape[-2:]
        return flat.reshape(-1, width, out) if layer.transposed else flat.reshape(-1, out, width)

    def constant_bytes(self, layer_id: int) -> memoryview:
        """The bytes of a Const that stays in the skeleton's .bin."""
        data = self.ir.data(layer_id)
        begin = int(data["offset"])
        stored = self._bin[begin : begin + int(data["size"])]
        order = self.vector_orders.get(layer_id)
        return memoryview(stored if order is None else stored.reshape(-1, 4)[order].reshape(-1))

    def _find_layers(self) -> Iterator[Layer]:
        lifted = {w["id"]: w for w in self.skeleton.weights}
        order = {number: i for i, number in enumerate(self.ir.layers)}
        found = []
        for number, element in self.ir.layers.items():
            kind, name = element.attrib["type"], element.attrib.get("name", "")
            record = lifted.get(name) if kind == "Parameter" else None
            if record is None and not (kind == "Const" and self._is_matrix(number)):
                continue
            uses = self.weight_readers(number)
            if record is None and any(self.ir.kind(r) == "Gather" for r, _ in uses):
                # An embedding of the checkpoint has been lifted; what is looked up here is a computed table (positions, rotary).
                continue
            if not uses:
                if record is not None:
                    raise ArchitectureError(
                        record["tensor"],
                        "an operation that is neither MatMul nor Gather reads it as a placeholder",
                        "Please report this model.",
                    )
                continue
            found.append((number, record, uses))
        last = max((order[r] for _, _, uses in found for r, _ in uses if self.ir.kind(r) == "MatMul"), default=-1)
        for number, record, uses in sorted(found, key=lambda f: min(order[r] for r, _ in f[2])):
            yield self._layer(number, record, uses, order, last)

    def _dtype(self, pieces: Pieces) -> str:
        """Raises ArchitectureError if what a layer is made of is of several types, or of one that is not read."""
        kinds = sorted({self.checkpoint.tensors[tensor].dtype for tensor in pieces.tensors})
        if len(kinds) > 1:
            raise ArchitectureError(
                " + ".join(pieces.tensors[:2]), f"parts of one matrix are stored as {' and '.join(kinds)}", "Store them in one type"
            )
        if kinds[0] not in FLOAT_TYPES.values():
            raise ArchitectureError(
                f"tensor {pieces.tensors[0]}", f"{kinds[0]} weights are not read", "Use a float32, float16 or bfloat16 checkpoint"
            )
        return kinds[0]

    def _is_matrix(self, number: int) -> bool:
        data = self.ir.data(number)
        shape = self.ir.output_shape(number)
        return data.get("element_type") in FLOAT_TYPES and len(shape) in (2, 3) and int(data["size"]) >= MATRIX_BYTES and min(shape) > 1

    def weight_readers(self, number: int) -> list[tuple[int, int]]:
        """(layer, port) of the MatMuls and Gathers that read a constant as their weight, through a Convert or directly.

        Empty if anything else reads it, or if the readers disagree about which axis is out. What only asks for its shape does not count where
        that is the shape that will be written, (out, in).
        """
        uses: list[tuple[int, int]] = []
        for reader, port in self.ir.readers(number):
            if self.ir.kind(reader) == "Convert":
                uses.extend(self.ir.readers(reader))
            else:
                uses.append((reader, port))
        asking = [use for use in uses if self.ir.kind(use[0]) == "ShapeOf"]
        uses = [use for use in uses if use not in asking]
        fits = all((self.ir.kind(r) == "MatMul" and p == 1) or (self.ir.kind(r) == "Gather" and p == 0) for r, p in uses)
        # A Gather looks rows up, as a MatMul with transpose_b multiplies by them.
        by_row = {self.ir.kind(r) == "Gather" or self.ir.data(r).get("transpose_b", "false").lower() == "true" for r, _ in uses}
        return uses if fits and len(by_row) == 1 and (not asking or by_row == {True}) else []

    def _layer(self, number: int, record: dict[str, Any] | None, uses: list[tuple[int, int]], order: dict[int, int], last: int) -> Layer:
        readers = sorted({r for r, _ in uses}, key=lambda r: order[r])
        shape = self.ir.output_shape(number)
        transposed = any(self.ir.kind(r) == "MatMul" and self.ir.data(r).get("transpose_b", "false").lower() != "true" for r in readers)
        if transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        if record is not None:
            tensor = record["tensor"]
            stored = record.get("matrices")
            pieces = Pieces.from_json(stored) if stored else Pieces.of(tensor, self.checkpoint.tensors[tensor].shape)
            name, dtype = tensor.removesuffix(".weight"), self._dtype(pieces)
            source = Source(number, pieces)
        else:
            tensor = name = self.ir.name(number)
            dtype = FLOAT_TYPES[self.ir.data(number)["element_type"]]
            source = Source(number, None, int(self.ir.data(number)["offset"]))
        while name in self.sources or name in self._taken:
            name += "'"
        self.sources[name] = source
        block = BLOCK.search(name + ".")
        return Layer(
            name=name,
            tensor=tensor,
            shape=shape,
            ops=tuple(sorted({self.ir.kind(r) for r in readers})),
            nodes=tuple(self.ir.name(r) for r in readers),
            dtype=dtype,
            block=int(block.group(1)) if block else None,
            order=min(order[r] for r in readers),
            last=any(order[r] == last for r in readers),
            transposed=transposed,
            vision=self._vision,
        )


def make_graphs(skeletons: Sequence[Skeleton], checkpoint: Checkpoint) -> tuple[ModelGraph, ...]:
    """The graphs of a model, one for each submodel; no two layers have the same name, though both may read the same tensor."""
    graphs: list[ModelGraph] = []
    for skeleton in skeletons:
        graphs.append(ModelGraph(skeleton, checkpoint, [layer.name for graph in graphs for layer in graph.layers]))
    return tuple(graphs)


def unused_tensors(graphs: Sequence[ModelGraph]) -> list[str]:
    """Checkpoint tensors that nothing in any of the graphs is made of."""
    used = set().union(*(graph.used for graph in graphs))
    return [name for name in graphs[0].checkpoint.tensors if name not in used]


def flat_rows(layer: Layer) -> int:
    """Rows of the layer when leading axes are flattened."""
    return prod(layer.shape[:-1])


def _joined(first: Order, then: Order) -> Order:
    return Order(*(a if b is None else _behind(a, b) for a, b in ((first.rows, then.rows), (first.columns, then.columns))))


def _behind(first: NDArray[np.int64] | None, then: NDArray[np.int64]) -> NDArray[np.int64]:
    return then if first is None else first[then]
