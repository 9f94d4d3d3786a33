"""Where a factor for each channel can move from one weight into another without changing what the model computes.

A *source* makes channels: the norm weight (with its bias) in front of some layers, a normalization whose weight is gone (the exporter drops
a product with ones), or the rows (with their bias) of a layer. If everything
between the source and the layers that read it treats channels one by one and linearly, then dividing channel c at the source by t[c]
and multiplying the readers' columns by t[c] changes nothing: norm into q/k/v and gate/up, v into o with grouped heads, up into down, fc1 through a ReLU into fc2.

Where no source is found, the factors' inverse can be multiplied with a layer's input while the model runs, which costs a little time.

Found by dependence, not by name: the channel numbers are carried through the graph's own reshapes, transposes and slices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.graph.model import ModelGraph

Labels = NDArray[np.int64]
"""Of a tensor, dynamic dimensions as 1: which channel of the source each element scales with."""
INTEGERS = {"i64": "<i8", "i32": "<i4"}


@dataclass(frozen=True)
class Vector:
    """A constant that is divided by its channels' factors."""

    layer_id: int
    labels: Labels
    """One per element, in the constant's shape."""


@dataclass(frozen=True)
class Fold:
    """One source and its readers."""

    channels: int
    free: NDArray[np.bool_]
    """[channels]: False for those whose factor must stay 1, since something else reads them."""
    writer: str | None
    """Name of the layer whose rows are the channels; None for a norm."""
    vectors: tuple[Vector, ...]
    """Norm weight and biases."""
    readers: dict[str, Labels]
    """Layer name -> the channel of each input."""
    behind: int | None = None
    """The operation whose output is divided by the factors, in a Multiply that the graph does not have: a normalization without a weight, or
    what gives the readers their input."""
    at_run_time: bool = False
    """That Multiply takes the place of no other."""

    @property
    def source(self) -> str:
        """What reports call it."""
        if self.at_run_time:
            return "product at run time"
        return self.writer or ("norm" if self.behind is None else "norm without a weight")


@dataclass
class _Walk:
    """What following one source's channels has found."""

    channels: int
    blocked: set[int] = field(default_factory=set)
    vectors: list[Vector] = field(default_factory=list)
    readers: dict[str, Labels] = field(default_factory=dict)
    nodes: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    passed: set[int] = field(default_factory=set)
    """Operations that channels have been carried through."""


def find_folds(graph: ModelGraph, at_run_time: bool = False) -> tuple[Fold, ...]:
    """All folds of a graph, in topological order of their sources; those that need a Multiply of their own come last.

    `at_run_time`: for layers that no source reaches a Multiply in front of them counts as one.

    Of two that would change the same weight's columns, or the same vector, only the first: factors are chosen and applied once.
    """
    found: list[Fold] = []
    taken: set[str | int] = set()
    finder = _Finder(graph)
    for fold in chain(finder.folds(), finder.bare_norms(), finder.inputs() if at_run_time else ()):
        changed: set[str | int] = {*fold.readers, *(vector.layer_id for vector in fold.vectors)}
        if not changed & taken:
            found.append(fold)
            taken |= changed
    return tuple(found)


class _Finder:
    def __init__(self, graph: ModelGraph) -> None:
        self.graph, self.ir = graph, graph.ir
        self.matmuls = graph.matmuls()

    def folds(self) -> Iterator[Fold]:
        for number in self.ir.layers:
            if number in self.matmuls:
                layer = self.matmuls[number]
                if len(layer.shape) == 2 and len(layer.nodes) == 1:
                    yield from self._from(number, layer.shape[0], layer.name, ())
            elif self.ir.kind(number) == "Multiply":
                vector = self._vector(number)
                if vector is not None:
                    yield from self._from(number, vector.labels.size, None, (vector,))

    def bare_norms(self) -> Iterator[Fold]:
        """Normalizations taken as sources themselves."""
        for number in self.ir.layers:
            if self._normalizes(number) and self.ir.output_type(number) == "FP32":
                yield from self._from(number, self._static(number)[-1], None, (), behind=number)

    def inputs(self) -> Iterator[Fold]:
        """What layers read taken as a source itself."""
        for number in dict.fromkeys(self.ir.inputs[matmul][0][0] for matmul, layer in self.matmuls.items() if len(layer.shape) == 2):
            one_output = len(self.ir.layers[number].findall("output/port")) == 1
            if one_output and self.ir.inputs[number] and self.ir.output_type(number) == "FP32":
                for fold in self._from(number, (self._static(number) or (1,))[-1], None, (), behind=number):
                    yield replace(fold, at_run_time=True)

    def _normalizes(self, number: int) -> bool:
        """A LayerNorm's core, or an RMSNorm's: a tensor times one computed number for each token."""
        if self.ir.kind(number) != "Multiply":
            return self.ir.kind(number) == "MVN"
        widths = [1]
        for source, _ in self.ir.inputs[number].values():
            if self.ir.kind(source) == "Const":
                return False
            widths.append((self._static(source) or (1,))[-1])
        return min(widths[1:]) == 1 and max(widths) > 1

    def _vector(self, number: int) -> Vector | None:
        """The norm weight that a Multiply applies, if it does."""
        shape = self._static(number)
        for source, _ in self.ir.inputs[number].values():
            if self._is_vector(source) and self.ir.output_shape(source)[-1] == shape[-1] == prod(self.ir.output_shape(source)):
                return Vector(source, np.arange(shape[-1]).reshape(self.ir.output_shape(source)))
        return None

    def _is_vector(self, source: int) -> bool:
        """A float constant of several values that nothing else reads."""
        return (
            self.ir.kind(source) == "Const"
            and self.ir.data(source)["element_type"] == "f32"
            and prod(self.ir.output_shape(source)) > 1
            and len(self.ir.readers(source)) == 1
        )

    def _from(
        self, number: int, channels: int, writer: str | None, vectors: tuple[Vector, ...], behind: int | None = None
    ) -> Iterator[Fold]:
        shape = self._static(number)
        if not shape or shape[-1] != channels or prod(shape) != channels:
            return
        walk = _Walk(channels, vectors=list(vectors))
        self._follow(walk, (number, None), np.arange(channels).reshape(shape))
        # A layer that is read in several places must get the same factors in all of them.
        for name in list(walk.readers):
            layer = next(one for one in self.graph.layers if one.name == name)
            if len(walk.nodes[name]) != len(layer.nodes) or "Gather" in layer.ops:
                walk.blocked.update(np.unique(walk.readers.pop(name)).tolist())
        free = np.ones(channels, bool)
        free[list(walk.blocked)] = False
        used = np.zeros(channels, bool)
        for labels in walk.readers.values():
            used[labels] = True
        if (free & used).any():
            yield Fold(channels, free & used, writer, tuple(walk.vectors), walk.readers, behind)

    def _follow(self, walk: _Walk, output: tuple[int, int | None], labels: Labels) -> None:
        """Carry the channels of one tensor on to everything that reads it."""
        for reader, port in self.ir.readers(*output):
            kind = self.ir.kind(reader)
            if kind in ("ShapeOf", "Assign"):
                continue
            if kind == "MatMul" and port == 0 and reader in self.matmuls and labels.shape[-1] == labels.size:
                self._reach(walk, reader, labels)
                continue
            try:
                carried = self._carry(walk, kind, reader, port, labels)
            except ComputedError:
                carried = None
            # Met from two sides: a product of two tracked tensors is not linear.
            if carried is None or reader in walk.passed:
                walk.blocked.update(np.unique(labels).tolist())
                continue
            walk.passed.add(reader)
            for out, moved in carried.items():
                self._follow(walk, (reader, out), moved)

    def _reach(self, walk: _Walk, reader: int, labels: Labels) -> None:
        layer, flat = self.matmuls[reader], labels.reshape(-1)
        known = walk.readers.setdefault(layer.name, flat)
        if not np.array_equal(known, flat) or self.ir.data(reader).get("transpose_a", "false").lower() == "true":
            walk.blocked.update(np.unique(np.concatenate([known, flat])).tolist())
        walk.nodes[layer.name].add(self.ir.name(reader))

    def _carry(self, walk: _Walk, kind: str, number: int, port: int, labels: Labels) -> dict[int | None, Labels] | None:
        """Output port -> channels behind an operation; None if it mixes channels or is not linear in them."""
        target = self._static(number)
        match kind:
            case "Reshape" | "Unsqueeze" | "Squeeze" | "Convert" if port == 0 and prod(target) == labels.size:
                return {None: labels.reshape(target)}
            case "Transpose" if port == 0:
                return {None: labels.transpose([int(i) for i in integer_input(self.graph, number, 1)])}
            case "Broadcast" if port == 0 and len(target) == labels.ndim:
                return {None: np.broadcast_to(labels, target)}
            case "ScaledDotProductAttention" if port == 2 and target == labels.shape:
                return {None: labels}
            case "Gather" if port == 0 and labels.shape[int(integer_input(self.graph, number, 2)[0])] == 1:
                return {None: labels}
            case "Concat" if self._appends_to_state(number, port, labels):
                return {None: labels}
            case "ReLU":
                # max(0, x / t) = max(0, x) / t, for factors are positive.
                return {None: labels}
            case "Multiply":
                return {None: np.broadcast_to(labels, target)} if len(target) == labels.ndim else None
            case "Add":
                return self._add(walk, number, port, labels)
            case "Slice" if port == 0:
                return self._slice(number, labels)
            case "VariadicSplit" | "Split" if port == 0:
                return self._split(number, labels)
            case _:
                return None

    def _add(self, walk: _Walk, number: int, port: int, labels: Labels) -> dict[int | None, Labels] | None:
        other = self.ir.inputs[number][1 - port][0]
        if not self._is_vector(other) or self._static(number) != labels.shape:
            return None
        shape = self.ir.output_shape(other)
        aligned = (1,) * (labels.ndim - len(shape)) + shape
        if len(shape) > labels.ndim or aligned != labels.shape:
            return None
        walk.vectors.append(Vector(other, labels.reshape(shape)))
        return {None: labels}

    def _appends_to_state(self, number: int, port: int, labels: Labels) -> bool:
        """Only the model's own cache stands in front of the tensor: it holds what was scaled before."""
        axis = int(self.ir.data(number)["axis"])
        others = [source for p, (source, _) in self.ir.inputs[number].items() if p != port]
        while others and self.ir.kind(others[0]) in ("Gather", "Convert"):
            others[0] = self.ir.inputs[others[0]][0][0]
        return len(others) == 1 and self.ir.kind(others[0]) == "ReadValue" and labels.shape[axis] == 1

    def _slice(self, number: int, labels: Labels) -> dict[int | None, Labels] | None:
        start, stop, step, axes = (integer_input(self.graph, number, p) for p in (1, 2, 3, 4))
        index: list[Any] = [slice(None)] * labels.ndim
        for a, b, s, axis in zip(start, stop, step, axes, strict=True):
            index[int(axis)] = slice(int(a), int(b), int(s))
        return {None: labels[tuple(index)]}

    def _split(self, number: int, labels: Labels) -> dict[int | None, Labels] | None:
        axis = int(integer_input(self.graph, number, 1)[0])
        outputs = self.ir.layers[number].findall("output/port")
        pieces: dict[int | None, Labels] = {}
        start = 0
        for element in outputs:
            size = int([d.text or -1 for d in element.iterfind("dim")][axis])
            index: list[Any] = [slice(None)] * labels.ndim
            index[axis] = slice(start, start + size)
            pieces[int(element.attrib["id"])] = labels[tuple(index)]
            start += size
        return pieces if start == labels.shape[axis] else None

    def _static(self, number: int) -> tuple[int, ...]:
        """The shape of an output with dynamic dimensions as 1."""
        return tuple(1 if d == -1 else d for d in self.ir.output_shape(number))


class ComputedError(Exception):
    """An operation's axes or bounds are not constants."""


def integer_input(graph: ModelGraph, number: int, port: int) -> NDArray[np.int64]:
    """The values of an integer constant that an operation reads, as many as it has.

    Raises:
        ComputedError: the input is computed.
    """
    source = graph.ir.inputs[number][port][0]
    while graph.ir.kind(source) == "Convert":
        source = graph.ir.inputs[source][0][0]
    kind = INTEGERS.get(graph.ir.data(source).get("element_type", ""))
    if graph.ir.kind(source) != "Const" or kind is None:
        raise ComputedError
    return np.frombuffer(graph.constant_bytes(source), kind).astype(np.int64)
