"""Unsigned integers of 4 or 8 bits less a zero point that need not be one, times a scale: for weights that are stored as scale · code + minimum.

Nothing is rounded to it: a format that picks its ranges itself does as well with an integer zero point, which takes a fraction of the room.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmcomp.errors import OptionError
from llmcomp.formats.array import Namespace
from llmcomp.formats.format import Format, Node, register_family


@dataclass(frozen=True)
class Offset(Format):
    """Zero points are f32, and so is the arithmetic of the chain: f16 would round what stands between two codes."""

    rules: tuple[str, ...] = ()

    def ranges(self, xp: Namespace, w: Any, rule: str = "minmax") -> dict[str, Any]:
        raise OptionError(f"rule {rule!r}", f"{self.name} rounds nothing, it holds what is stored so", "Use int4_asym or int8_asym")

    def encode(self, xp: Namespace, w: Any, scale: Any, zero_point: Any = None) -> Any:
        return xp.clip(xp.round(xp.add(xp.divide(w, scale), zero_point)), 0.0, float(2**self.bits - 1))

    def decode(self, xp: Namespace, codes: Any, scale: Any, zero_point: Any = None) -> Any:
        return xp.multiply(xp.subtract(codes, zero_point), scale)

    def chain(self, shape: tuple[int, ...], group_size: int, scale_type: str = "f16", to: str = "f32") -> Node:
        scale = Node("Part", attr="scale")
        wide = Node("Multiply", (self.levels("f32"), scale if scale_type == "f32" else Node("Convert", (scale,), "f32")))
        node = wide if group_size == -1 else Node("Reshape", (wide,), tuple(shape))
        return node if to == "f32" else Node("Convert", (node,), to)

    def levels(self, scale_type: str) -> Node:
        return Node("Subtract", (super().levels(scale_type), Node("Part", attr="zero_point")))


def _make(argument: str) -> Offset:
    if argument not in ("4", "8"):
        raise OptionError(f"offset[{argument}]", "it has 4 or 8 bits", "Write offset[4] or offset[8]")
    bits = int(argument)
    return Offset(f"offset[{bits}]", bits, f"u{bits}", for_embeddings=True, zero_point_type="f32")


register_family("offset", _make)
