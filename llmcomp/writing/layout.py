"""Where each byte of the .bin will be, known from the plan alone.

    [layer parts, each at a multiple of 64] [constants of the skeleton] [shapes of the Reshapes] [tail: scales that need f32]

Only the tail depends on the weights; its place is fixed and it is written last, in plan order, so the same input gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmcomp import formats
from llmcomp.formats import Node, Part
from llmcomp.graph.layer import Layer
from llmcomp.graph.model import ModelGraph

ALIGN = 64
"""Alignment of every constant, a cache line: the plugins read it in place."""
SOURCE_TYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
FLOATS = {"keep": None, "fp16": "f16", "fp32": "f32"}
"""Schemes that compress nothing: the source's own bytes, or cast to an element type."""


@dataclass(frozen=True)
class Slot:
    """A constant's place in the .bin."""

    part: Part
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.part.nbytes


@dataclass(frozen=True)
class Scheme:
    """What becomes of one layer: a number format and its group size, or one of FLOATS."""

    format: str
    group_size: int

    @property
    def is_float(self) -> bool:
        return self.format in FLOATS


@dataclass(frozen=True)
class Layout:
    slots: Mapping[tuple[str, str], Slot]
    """(layer name, part name) -> place; f16 scales are here even if a layer's move to the tail."""
    constants: Mapping[int, tuple[int, int]]
    """Const layer of the skeleton -> (offset, bytes)."""
    shapes: Mapping[tuple[int, ...], int]
    """Reshape target -> offset of its i64 values."""
    size: int
    """Bytes before the tail."""


def float_type(layer: Layer, scheme: Scheme) -> str:
    """The element type of a layer that is not compressed."""
    return FLOATS[scheme.format] or SOURCE_TYPES[layer.dtype]


def layer_parts(layer: Layer, scheme: Scheme, scale_type: str = "f16") -> tuple[Part, ...]:
    """The stored constants of a layer, in file order."""
    if scheme.is_float:
        return (Part("weight", float_type(layer, scheme), layer.shape),)
    return formats.get(scheme.format).parts(layer.shape, scheme.group_size, scale_type)


def layer_chain(layer: Layer, scheme: Scheme, scale_type: str = "f16") -> Node:
    """The operations that give the f32 weight back."""
    if scheme.is_float:
        part = Node("Part", attr="weight")
        return part if float_type(layer, scheme) == "f32" else Node("Convert", (part,), "f32")
    return formats.get(scheme.format).chain(layer.shape, scheme.group_size, scale_type, to="f32")


def layer_bytes(layer: Layer, scheme: Scheme) -> int:
    """Exact stored bytes of a layer, alignment apart."""
    return sum(p.nbytes for p in layer_parts(layer, scheme))


def make_layout(graph: ModelGraph, schemes: Mapping[str, Scheme]) -> Layout:
    """The place of every constant of the output.

    `schemes` has an entry for every layer of `graph`.
    """
    position = 0

    def take(nbytes: int) -> int:
        nonlocal position
        begin = -(-position // ALIGN) * ALIGN
        position = begin + nbytes
        return begin

    slots = {}
    for layer in graph.layers:
        for part in layer_parts(layer, schemes[layer.name]):
            slots[layer.name, part.name] = Slot(part, take(part.nbytes))
    constants: dict[int, tuple[int, int]] = {}
    seen: dict[tuple[str, str], tuple[int, int]] = {}
    replaced = {s.layer_id for s in graph.sources.values()}
    for number in graph.ir.constants():
        if number in replaced:
            continue
        data = graph.ir.data(number)
        key = (data["offset"], data["size"])
        if key not in seen:
            seen[key] = (take(int(data["size"])), int(data["size"]))
        constants[number] = seen[key]
    shapes: dict[tuple[int, ...], int] = {}
    for layer in graph.layers:
        for shape in reshape_targets(layer_chain(layer, schemes[layer.name])):
            if shape not in shapes:
                shapes[shape] = take(8 * len(shape))
    return Layout(slots, constants, shapes, -(-position // ALIGN) * ALIGN)


def reshape_targets(node: Node) -> list[tuple[int, ...]]:
    """Targets of the Reshapes in a chain."""
    own = [tuple(node.attr)] if node.op == "Reshape" and isinstance(node.attr, tuple) else []
    return [*own, *(t for i in node.inputs for t in reshape_targets(i))]


def shape_bytes(shape: Sequence[int]) -> bytes:
    """A Reshape's target as the IR stores it: little-endian i64."""
    return np.asarray(shape, "<i8").tobytes()
