"""Where each byte of the .bin will be, known from the plan alone.

    [layer parts, each at a multiple of 64] [constants of the skeleton] [factors of folds] [integers of the chains] [tail: scales that need f32]

Only the tail depends on the weights; its place is fixed and it is written last, in plan order, so the same input gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmcomp.formats import Node, Part
from llmcomp.graph.folds import Fold
from llmcomp.graph.layer import Layer
from llmcomp.graph.model import ModelGraph
from llmcomp.planning import Scheme, layer_chain, layer_parts, stored

ALIGN = 64
"""Alignment of every constant, a cache line: the plugins read it in place."""

GATHER_AXIS = (0,)
"""Along which a Gather in a chain looks up: a table has one axis only."""
LAST_AXIS = (-1,)
"""Along which inputs are sorted."""


@dataclass(frozen=True)
class Slot:
    """A constant's place in the .bin."""

    part: Part
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.part.nbytes


@dataclass(frozen=True)
class Layout:
    slots: Mapping[tuple[str, str], Slot]
    """(name of a layer or of one of its adapters, part name) -> place; f16 scales are here even if a layer's move to the tail."""
    constants: Mapping[int, tuple[int, int]]
    """Const layer of the skeleton, those in bodies of loops among them -> (offset, bytes)."""
    inserted: Mapping[int, tuple[int, int]]
    """Operation of the skeleton behind which folds put a Multiply -> (offset, bytes) of its f32 constant."""
    integers: Mapping[tuple[int, ...], int]
    """Reshape targets and Gather axes -> offset of their i64 values."""
    size: int
    """Bytes before the tail."""

    def of(self, layer: str) -> list[Slot]:
        """The places of a layer's parts, in file order."""
        return [slot for (name, _), slot in self.slots.items() if name == layer]


def make_layout(graph: ModelGraph, schemes: Mapping[str, Scheme], folds: Collection[Fold] = ()) -> Layout:
    """The place of every constant of the output.

    `schemes` has an entry for every layer of `graph`. Constants that `folds` change get other values, so they share no place.
    """
    changed = {vector.layer_id for fold in folds for vector in fold.vectors}
    position = 0

    def take(nbytes: int) -> int:
        nonlocal position
        begin = -(-position // ALIGN) * ALIGN
        position = begin + nbytes
        return begin

    slots = {}
    matrices = stored(graph.layers, schemes)
    for layer, scheme in matrices:
        for part in layer_parts(layer, scheme):
            slots[layer.name, part.name] = Slot(part, take(part.nbytes))
    constants: dict[int, tuple[int, int]] = {}
    seen: dict[tuple[str, str], tuple[int, int]] = {}
    replaced = {s.layer_id for s in graph.sources.values()}
    for number in (*graph.ir.constants(), *graph.ir.body_constants()):
        if number in replaced:
            continue
        data = graph.ir.data(number)
        key = (data["offset"], data["size"])
        if number in changed:
            constants[number] = (take(int(data["size"])), int(data["size"]))
            continue
        if key not in seen:
            seen[key] = (take(int(data["size"])), int(data["size"]))
        constants[number] = seen[key]
    inserted = {fold.behind: (take(4 * fold.channels), 4 * fold.channels) for fold in folds if fold.behind is not None}
    integers: dict[tuple[int, ...], int] = {}
    for layer, scheme in matrices:
        for values in (*chain_integers(layer_chain(layer, scheme)), *([LAST_AXIS] if scheme.sorted else [])):
            if values not in integers:
                integers[values] = take(8 * len(values))
    return Layout(slots, constants, inserted, integers, -(-position // ALIGN) * ALIGN)


def layer_room(layer: Layer, scheme: Scheme) -> int:
    """Bytes that a layer's parts take in the .bin, alignment included."""
    return sum(-(-part.nbytes // ALIGN) * ALIGN for part in layer_parts(layer, scheme))


def chain_integers(node: Node) -> list[tuple[int, ...]]:
    """Targets of the Reshapes in a chain, and axes of its Gathers."""
    own = [tuple(node.attr)] if node.op == "Reshape" and isinstance(node.attr, tuple) else [GATHER_AXIS] if node.op == "Gather" else []
    return [*own, *(t for i in node.inputs for t in chain_integers(i))]


def integer_bytes(values: Sequence[int]) -> bytes:
    """Integers as the IR stores them: little-endian i64."""
    return np.asarray(values, "<i8").tobytes()
