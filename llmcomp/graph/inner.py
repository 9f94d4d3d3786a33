"""Where the channels between layers can change places without changing what the model computes: the inner dimension of an MLP.

If nothing but elementwise operations, linear or not, lies between the rows of some layers (gate and up, both halves of a fused one, fc1) and the
columns of others (down, fc2), then both can be put into another order, and vectors in between (biases) with them.

Found by dependence, not by name: from the input of a layer back to the layers that make it; anything but the operations below ends the search.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np
from numpy.typing import NDArray

from llmcomp.graph.folds import ComputedError, integer_input
from llmcomp.graph.layer import Layer
from llmcomp.graph.model import ModelGraph, Order

# fmt: off
UNARY = frozenset((
    "Abs", "Ceiling", "Clamp", "Convert", "Elu", "Erf", "Exp", "Floor", "Gelu", "HSigmoid", "HSwish", "HardSigmoid", "Log", "Mish",
    "Negative", "ReLU", "Selu", "Sigmoid", "Sign", "SoftPlus", "SoftSign", "Sqrt", "Swish", "Tanh",
))
# fmt: on
BINARY = frozenset(("Add", "Divide", "Maximum", "Minimum", "Multiply", "Power", "SquaredDifference", "Subtract"))
SAME_ROWS = frozenset(("Reshape", "Squeeze", "Unsqueeze"))
"""They keep each row of the last axis as it is, if the axis keeps its size."""


@dataclass(frozen=True)
class Inner:
    """Channels that can be put into any order."""

    channels: int
    writers: dict[str, tuple[int, ...]]
    """Layer name -> the rows from which on all channels lie in a run: two runs if gate and up are one weight."""
    readers: tuple[str, ...]
    """Layers whose columns the channels are."""
    vectors: dict[int, tuple[int, ...]]
    """Const layer of f32 -> as `writers`."""


def reorder(graph: ModelGraph, inner: Inner, order: NDArray[np.int64]) -> ModelGraph:
    """The graph in which channel i is what channel order[i] [channels] has been."""
    layers = {layer.name: layer for layer in graph.layers}
    rows = {name: _index(order, starts, layers[name].shape[0]) for name, starts in inner.writers.items()}
    changed = {name: Order(rows.get(name), order if name in inner.readers else None) for name in {*rows, *inner.readers}}
    vectors = {number: _index(order, starts, prod(graph.ir.output_shape(number))) for number, starts in inner.vectors.items()}
    return graph.reordered(changed, vectors)


def _index(order: NDArray[np.int64], starts: tuple[int, ...], size: int) -> NDArray[np.int64]:
    index = np.arange(size)
    for start in starts:
        index[start : start + len(order)] = start + order
    return index


def find_inner(graph: ModelGraph) -> tuple[Inner, ...]:
    """All inner dimensions of a graph, in topological order."""
    return tuple(_Finder(graph).all())


class _Finder:
    def __init__(self, graph: ModelGraph) -> None:
        self.graph, self.ir = graph, graph.ir
        self.matmuls = graph.matmuls()
        data = [graph.ir.data(number) for number in graph.ir.constants()]
        self.places = Counter((one["offset"], one["size"]) for one in data)
        self.names = Counter(graph.ir.name(number) for number in graph.ir.layers)

    def all(self) -> Iterator[Inner]:
        sites: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number in self.matmuls:
            sites[self.ir.inputs[number][0]].append(number)
        for source, readers in sites.items():
            layers = [self.matmuls[number] for number in readers]
            turned = any(self.ir.data(number).get("transpose_a", "false").lower() == "true" for number in readers)
            channels = layers[0].shape[-1]
            if channels > 1 and not turned and all(_is_plain(layer) for layer in layers):
                yield from self._behind(source, channels, readers)

    def _behind(self, source: tuple[int, int], channels: int, readers: list[int]) -> Iterator[Inner]:
        """Follow the input of `readers` back, all channels together: they are [start, start + channels) of a last axis of some width."""
        writers: dict[str, set[int]] = defaultdict(set)
        vectors: dict[int, set[int]] = defaultdict(set)
        pending, seen, passed = [(*source, 0, channels)], set(), set()
        while pending:
            state = pending.pop()
            number, _, start, width = state
            if state in seen:
                continue
            seen.add(state)
            if self.ir.kind(number) == "Const":
                if not self._is_vector(number, width):
                    return
                vectors[number].add(start)
                continue
            passed.add(number)
            if number in self.matmuls:
                layer = self.matmuls[number]
                if not _is_plain(layer) or layer.shape[0] != width:
                    return
                writers[layer.name].add(start)
                continue
            inputs = self._inputs(*state)
            if inputs is None:
                return
            pending += inputs
        # Whoever else reads one of these channels expects it in its place.
        allowed = {(number, 0) for number in readers}
        for number in passed:
            for reader, port in self.ir.readers(number):
                if reader not in passed and (reader, port) not in allowed and self.ir.kind(reader) != "ShapeOf":
                    return
        runs = [sorted(starts) for starts in (*writers.values(), *vectors.values())]
        if writers and not any(b - a < channels for starts in runs for a, b in pairwise(starts)):
            yield Inner(
                channels,
                {name: tuple(sorted(starts)) for name, starts in writers.items()},
                tuple(dict.fromkeys(self.matmuls[number].name for number in readers)),
                {number: tuple(sorted(starts)) for number, starts in vectors.items()},
            )

    def _inputs(self, number: int, port: int, start: int, width: int) -> list[tuple[int, int, int, int]] | None:
        """Where an operation takes these channels from; None if it is not known to leave them in their places."""
        kind, inputs = self.ir.kind(number), self.ir.inputs[number]
        if kind in UNARY or kind in BINARY:
            sizes = {place: self._size(number, place) for place in inputs}
            if not set(sizes.values()) <= {1, width} or self.ir.data(number).get("auto_broadcast", "numpy") != "numpy":
                return None
            return [(*inputs[place], start, width) for place, size in sizes.items() if size == width]
        if kind in SAME_ROWS and self._size(number, 0) == width == self.ir.output_shape(number)[-1]:
            return [(*inputs[0], start, width)]
        if kind in ("Split", "VariadicSplit", "Slice"):
            try:
                before = self._before(number, port)
            except ComputedError:
                return None
            return None if before is None else [(*inputs[0], before + start, self._size(number, 0))]
        return None

    def _before(self, number: int, port: int) -> int | None:
        """Where on its input's last axis an output of a split or slice begins; None if it is along another axis."""
        last = len(self._shape(number, 0)) - 1
        if self.ir.kind(number) == "Slice":
            start, _, step, axes = (integer_input(self.graph, number, place).tolist() for place in (1, 2, 3, 4))
            if axes not in ([last], [-1]) or step != [1]:
                return None
            return int(start[0]) % self._size(number, 0)
        if integer_input(self.graph, number, 1).tolist() not in ([last], [-1]):
            return None
        position = 0
        for element in self.ir.layers[number].findall("output/port"):
            if int(element.attrib["id"]) == port:
                return position
            position += [int(d.text or -1) for d in element.iterfind("dim")][-1]
        return None

    def _is_vector(self, number: int, width: int) -> bool:
        """A float constant along the last axis that belongs to one operation and shares neither its bytes nor its name."""
        data, shape = self.ir.data(number), self.ir.output_shape(number)
        alone = self.places[data["offset"], data["size"]] == self.names[self.ir.name(number)] == len(self.ir.readers(number)) == 1
        return alone and data["element_type"] == "f32" and shape[-1] == prod(shape) == width

    def _shape(self, number: int, place: int) -> tuple[int, ...]:
        """Dimensions of an input; -1 where dynamic."""
        ports = self.ir.layers[number].findall("input/port")
        element = next(port for port in ports if int(port.attrib["id"]) == place)
        return tuple(int(d.text or -1) for d in element.iterfind("dim"))

    def _size(self, number: int, place: int) -> int:
        """The last dimension of an input; 1 of a scalar."""
        return (self._shape(number, place) or (1,))[-1]


def _is_plain(layer: Layer) -> bool:
    """A matrix that one MatMul reads."""
    return len(layer.shape) == 2 and layer.ops == ("MatMul",) and len(layer.nodes) == 1
