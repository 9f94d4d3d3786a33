"""A scheme and what it makes of a layer: stored parts, decompression chain, bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmcomp import formats
from llmcomp.formats import Node, Part
from llmcomp.graph.layer import Layer

SOURCE_TYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
SEARCH, SCALE_ESTIMATION = "search", "scale_estimation"
"""Rules that every format has: several scales are tried for each group, and their errors weighed by the weights alone, or by the inputs."""
FLOATS: dict[str, str | None] = {"keep": None, "fp16": "f16", "fp32": "f32"}
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

    @property
    def is_calibrated(self) -> bool:
        """Whether the layer is compressed with what its inputs look like."""
        return self.rule == SCALE_ESTIMATION or self.rounding == "gptq"

    @property
    def is_float(self) -> bool:
        return self.format in FLOATS


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
