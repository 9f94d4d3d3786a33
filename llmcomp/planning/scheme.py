"""A scheme and what it makes of a layer: stored parts, decompression chain, bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from llmcomp import formats
from llmcomp.formats import Node, Part
from llmcomp.graph.layer import Layer

SOURCE_TYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
SEARCH, SCALE_ESTIMATION = "search", "scale_estimation"
"""Rules that every format has: several scales are tried for each group, and their errors weighed by the weights alone, or by the inputs."""
STORED, ORDER = "stored", "order"
"""The rule of layers that keep the codes, scales and zero points of the source: nothing is rounded. The part that says how columns are sorted."""
NOT_SORTABLE = "its columns are in the order of activations, and not all that reads it is a matrix product"
KEEP = "keep"
FLOATS: dict[str, str | None] = {KEEP: None, "fp16": "f16", "fp32": "f32"}
"""Schemes that compress nothing: the source's own type, or a cast to an element type."""


@dataclass(frozen=True)
class Scheme:
    """What becomes of one layer: a number format with its group size (-1: one per output channel), or one of FLOATS."""

    format: str
    group_size: int
    rule: str = "minmax"
    """What picks the scales: one of the format's rules, `search`, or `scale_estimation`, which needs calibration."""
    rounding: Literal["nearest", "gptq"] = "nearest"
    """What picks the codes. gptq: by the second moments of the layer's inputs, which needs calibration."""
    adapter_rank: int = 0
    """Of a low-rank correction that is computed beside the layer, which needs calibration; 0: none."""
    adapter_format: str = "int8_asym"
    """What the correction is stored in: a number format, one scale per channel, or one of FLOATS."""
    scale_type: Literal["f16", "f32"] = "f16"
    """Of the rule STORED: what holds its scales. All other scales are laid out as f16."""
    sorted: bool = False
    """Of the rule STORED: columns come in the order of their groups, and inputs are looked up in it."""

    @property
    def is_calibrated(self) -> bool:
        """Whether the layer is compressed with what its inputs look like."""
        return self.rule == SCALE_ESTIMATION or self.rounding == "gptq" or self.adapter_rank > 0

    @property
    def is_stored(self) -> bool:
        """Whether the layer keeps the codes of the source."""
        return self.rule == STORED

    @property
    def is_float(self) -> bool:
        return self.format in FLOATS


def float_type(layer: Layer, scheme: Scheme) -> str:
    """The element type of a layer that is not compressed."""
    return FLOATS[scheme.format] or SOURCE_TYPES[layer.dtype]


def layer_parts(layer: Layer, scheme: Scheme) -> tuple[Part, ...]:
    """The stored constants of a layer, in file order."""
    parts = _parts(layer.shape, scheme.format, scheme.group_size, SOURCE_TYPES[layer.dtype], scheme.scale_type)
    return (*parts, Part(ORDER, "i32", (layer.shape[-1],), "scale")) if scheme.sorted else parts


def _parts(shape: tuple[int, ...], name: str, group_size: int, source_type: str, scale_type: str) -> tuple[Part, ...]:
    if name in FLOATS:
        return (Part("weight", FLOATS[name] or source_type, shape),)
    return formats.get(name).parts(shape, group_size, scale_type)


def layer_chain(layer: Layer, scheme: Scheme, scale_type: str = "f16") -> Node:
    """The operations that give the f32 weight back."""
    if scheme.is_float:
        part = Node("Part", attr="weight")
        return part if float_type(layer, scheme) == "f32" else Node("Convert", (part,), "f32")
    return formats.get(scheme.format).chain(layer.shape, scheme.group_size, scale_type, to="f32")


def layer_bytes(layer: Layer, scheme: Scheme) -> int:
    """Exact stored bytes of a layer and its adapters, alignment apart."""
    return sum(p.nbytes for p in layer_parts(layer, scheme)) + adapter_bytes(layer.shape, scheme)


def nominal_bits(layer: Layer, name: str, group_size: int) -> float:
    """Bits per weight of a layer in a format, whether or not the group divides it; without adapters."""
    if name in FLOATS:
        return 8 * layer_bytes(layer, Scheme(name, -1)) / layer.size
    width = group_size if group_size > 0 else layer.shape[-1]
    # Eight channels together, so that no nibble is lost to rounding.
    return sum(part.nbytes for part in formats.get(name).parts((8, width), -1)) / width


def adaptable(layer: Layer) -> bool:
    """Whether a correction can be computed beside a layer: one MatMul reads it as a matrix."""
    return layer.ops == ("MatMul",) and len(layer.nodes) == 1 and len(layer.shape) == 2


def sortable(layer: Layer) -> bool:
    """Whether the inputs of a layer can be looked up in another order: MatMuls read it, as a matrix."""
    return layer.ops == ("MatMul",) and len(layer.shape) == 2


def adapters(layer: Layer, scheme: Scheme) -> tuple[tuple[Layer, Scheme], ...]:
    """A [rank, in] and B [out, rank], whose product with the input is added to the layer's output, as layers with schemes of their own."""
    if scheme.adapter_rank == 0:
        return ()
    own = Scheme(scheme.adapter_format, -1)
    shapes = zip(("lora_A", "lora_B"), _adapter_shapes(layer.shape, scheme.adapter_rank), strict=True)
    return tuple((replace(layer, name=f"{layer.name}/{n}", shape=s, dtype="F32", transposed=False), own) for n, s in shapes)


def _adapter_shapes(shape: tuple[int, ...], rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    out, width = shape
    return (rank, width), (out, rank)


def adapter_bytes(shape: tuple[int, ...], scheme: Scheme) -> int:
    """Exact stored bytes of the adapters of a layer (out, in)."""
    if scheme.adapter_rank == 0:
        return 0
    shapes = _adapter_shapes(shape, scheme.adapter_rank)
    return sum(p.nbytes for s in shapes for p in _parts(s, scheme.adapter_format, -1, "f32", "f16"))


def stored(layers: Iterable[Layer], schemes: Mapping[str, Scheme]) -> list[tuple[Layer, Scheme]]:
    """Every matrix that is stored, in file order: the layers, each with its adapters behind it."""
    return [pair for layer in layers for pair in ((layer, schemes[layer.name]), *adapters(layer, schemes[layer.name]))]
