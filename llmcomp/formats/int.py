"""Integers of 8, 4, 3 and 2 bits, symmetric and asymmetric."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.formats.array import Namespace, guard
from llmcomp.formats.format import Format, Node, Part, register

RANGE_FACTORS = ((1.0, 1.0), (0.95, 0.95), (0.88, 0.88), (0.95, 0.85), (0.85, 0.95))
"""What a search multiplies the two ends of an asymmetric range by."""


@dataclass(frozen=True)
class IntSym(Format):
    """Levels -2^(b-1) .. 2^(b-1)-1 times a scale.

    Codes are two's complement; where OpenVINO has no signed type of that width they are unsigned, with one zero point for the whole weight.
    """

    rules: tuple[str, ...] = ("minmax", "absolute")
    """minmax: a signed scale puts the extreme weight of a group exactly on the lowest level (NNCF, gguf). absolute: the largest
    magnitude lands on the highest level, and the lowest level stays unused (AutoAWQ)."""

    search_factors: tuple[float, ...] = (1.0, 0.92, 0.84, -1.0, -0.92)
    search_power: int = 2

    @property
    def offset(self) -> float:
        """What is added to a level to make its code."""
        return float(2 ** (self.bits - 1)) if self.code_type.startswith("u") else 0.0

    def ranges(self, xp: Namespace, w: Any, rule: str = "minmax") -> dict[str, Any]:
        lowest = float(2 ** (self.bits - 1))
        if self.check_rule(rule) == "absolute":
            return {"scale": guard(xp, xp.divide(xp.max(xp.abs(w)), lowest - 1))}
        below, above = xp.abs(xp.min(w)), xp.max(w)
        # -max where max dominates: then a positive extreme is lowest times a negative scale.
        extreme = xp.where(xp.less(below, above), xp.subtract(0.0, above), below)
        return {"scale": guard(xp, xp.divide(extreme, lowest))}

    def encode(self, xp: Namespace, w: Any, scale: Any, zero_point: Any = None) -> Any:
        lowest = float(2 ** (self.bits - 1))
        level = xp.clip(xp.round(xp.divide(w, scale)), -lowest, lowest - 1)
        return xp.add(level, self.offset) if self.offset else level

    def decode(self, xp: Namespace, codes: Any, scale: Any, zero_point: Any = None) -> Any:
        return xp.multiply(xp.subtract(codes, self.offset) if self.offset else codes, scale)

    def parts(self, shape: tuple[int, ...], group_size: int, scale_type: str = "f16") -> tuple[Part, ...]:
        parts = super().parts(shape, group_size, scale_type)
        return (*parts, Part("zero_point", "i8", (), "fixed")) if self.offset else parts

    def fixed(self) -> Mapping[str, NDArray[Any]]:
        return {"zero_point": np.array(self.offset, np.int8)} if self.offset else {}

    def levels(self, scale_type: str) -> Node:
        node = super().levels(scale_type)
        return Node("Subtract", (node, Node("Convert", (Node("Part", attr="zero_point"),), scale_type))) if self.offset else node


@dataclass(frozen=True)
class IntAsym(Format):
    """Unsigned codes minus a zero point, times a positive scale; the range of a group always contains zero."""

    def ranges(self, xp: Namespace, w: Any, rule: str = "minmax") -> dict[str, Any]:
        self.check_rule(rule)
        return self._between(xp, xp.min(w), xp.max(w))

    def _between(self, xp: Namespace, low: Any, high: Any) -> dict[str, Any]:
        highest = float(2**self.bits - 1)
        low, high = xp.minimum(0.0, low), xp.maximum(0.0, high)
        scale = guard(xp, xp.divide(xp.subtract(high, low), highest))
        zero_point = xp.clip(xp.subtract(0.0, xp.round(xp.divide(low, scale))), 0.0, highest)
        return {"scale": scale, "zero_point": zero_point}

    def candidates(self, xp: Namespace, w: Any, weight: Any) -> Iterator[dict[str, Any]]:
        ranges = self.ranges(xp, w)
        yield ranges
        for low, high in RANGE_FACTORS:
            yield self.refit(xp, w, weight, self._between(xp, xp.multiply(xp.min(w), low), xp.multiply(xp.max(w), high)))

    def encode(self, xp: Namespace, w: Any, scale: Any, zero_point: Any = None) -> Any:
        highest = float(2**self.bits - 1)
        return xp.clip(xp.round(xp.add(xp.divide(w, scale), zero_point)), 0.0, highest)

    def decode(self, xp: Namespace, codes: Any, scale: Any, zero_point: Any = None) -> Any:
        return xp.multiply(xp.subtract(codes, zero_point), scale)

    def levels(self, scale_type: str) -> Node:
        return Node("Subtract", (super().levels(scale_type), Node("Convert", (Node("Part", attr="zero_point"),), scale_type)))


register(
    IntAsym("int8_asym", 8, "u8", for_embeddings=True, group_size=-1, zero_point_type="u8"),
    IntSym("int8_sym", 8, "i8", for_embeddings=True, group_size=-1),
    IntAsym("int4_asym", 4, "u4", for_embeddings=True, zero_point_type="u4"),
    IntSym("int4_sym", 4, "i4", for_embeddings=True),
    IntSym("int3_sym", 3, "u3"),
    IntSym("int2_sym", 2, "u2"),
)
