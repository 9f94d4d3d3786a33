"""MXFP4 and MXFP8: E2M1 or E4M3 elements, 32 to a scale that is a power of two (OCP Microscaling Formats 1.0)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.formats import e2m1
from llmcomp.formats.array import Namespace, floor_power, guard
from llmcomp.formats.format import Format, largest, register
from llmcomp.formats.fp import E4M3_MAX, Fp4, Fp8

BIAS = 127
"""Of the exponents in f8e8m0."""
LIMIT = 7.25
"""Largest |weight| / scale of the rule `fit` for E2M1. Values above 6 are cut to it, which costs less than steps of twice the size: with 7.25
the mean squared error of normal and heavy-tailed weights is within 0.3 % of the best exponent of each group."""


@dataclass(frozen=True)
class _Mx(Format):
    element: Format = field(default_factory=lambda: Fp4("", 4, e2m1.TYPE))
    maximum: float = e2m1.MAX
    """Largest value of the element type."""
    top: float = 4.0
    """Largest power of two of the element type."""
    carry: float = 1.75
    """Least mantissa that rounds up to 2 in the element type."""
    rules: tuple[str, ...] = ("minmax", "floor", "even")
    """minmax: the least power that keeps every element within the type's range (NNCF; ceil, or RCEIL, elsewhere). floor: the exponent of
    the largest magnitude less that of the element type's largest power, so that a group may be cut (the OCP text, gguf). even: floor of
    the magnitude first rounded to the element's mantissa (compressed-tensors). fit: as minmax, with up to LIMIT / 6 of the range cut."""

    def ranges(self, xp: Namespace, w: Any, rule: str = "minmax") -> dict[str, Any]:
        rule, extreme = self.check_rule(rule), largest(xp, w, "minmax")
        if rule in ("minmax", "fit"):
            limit = self.maximum if rule == "minmax" else self.maximum * LIMIT / e2m1.MAX
            scale = guard(xp, xp.divide(extreme, limit))
            below = floor_power(xp, scale)
            return {"scale": xp.where(xp.less(below, scale), xp.multiply(below, 2.0), below)}
        scale = guard(xp, xp.divide(extreme, self.top))
        below = floor_power(xp, scale)
        if rule == "floor":
            return {"scale": below}
        return {"scale": xp.where(xp.less(scale, xp.multiply(below, self.carry)), below, xp.multiply(below, 2.0))}

    def candidates(self, xp: Namespace, w: Any, weight: Any) -> Iterator[dict[str, Any]]:
        scale = self.ranges(xp, w)["scale"]
        yield {"scale": scale}
        yield {"scale": guard(xp, xp.multiply(scale, 0.5))}

    def encode(self, xp: Namespace, w: Any, scale: Any, zero_point: Any = None) -> Any:
        return self.element.encode(xp, w, scale)

    def decode(self, xp: Namespace, codes: Any, scale: Any, zero_point: Any = None) -> Any:
        return self.element.decode(xp, codes, scale)

    def store_scale(self, scale: NDArray[np.float32], scale_type: str, rule: str = "minmax") -> dict[str, NDArray[Any]]:
        # The exponent as it stands in the bits: where subnormals are taken for zeros, a logarithm or a comparison would lose 2^-127.
        return {"scale": (np.ascontiguousarray(scale, np.float32).view(np.uint32) >> 23).astype(np.uint8)}

    def load_scale(self, parts: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        return np.ldexp(np.float32(1), parts["scale"].astype(np.int32) - BIAS)


register(
    _Mx(
        "mxfp4",
        4,
        e2m1.TYPE,
        group_size=32,
        fixed_group=True,
        scale_type="f8e8m0",
        rules=("minmax", "floor", "even", "fit"),
        best_rule="fit",
    ),
    _Mx(
        "mxfp8_e4m3",
        8,
        "f8e4m3",
        group_size=32,
        fixed_group=True,
        scale_type="f8e8m0",
        element=Fp8("", 8, "f8e4m3"),
        maximum=E4M3_MAX,
        top=256.0,
        carry=1.9375,
    ),
)
