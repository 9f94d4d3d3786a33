"""Integers of 8 and 4 bits, symmetric and asymmetric."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.formats.array import EPS, Namespace
from llmcomp.formats.format import Format, register


@dataclass(frozen=True)
class IntSym(Format):
    """Two's complement codes times a signed scale: the extreme weight of a group lands exactly on the lowest level."""

    def quantize(self, xp: Namespace, w: Any) -> dict[str, Any]:
        lowest = float(2 ** (self.bits - 1))
        below, above = xp.abs(xp.min(w)), xp.max(w)
        # -max where max dominates: then a positive extreme is lowest times a negative scale.
        extreme = xp.where(xp.less(below, above), xp.subtract(0.0, above), below)
        scale = _guard(xp, xp.divide(extreme, lowest))
        codes = xp.clip(xp.round(xp.divide(w, scale)), -lowest, lowest - 1)
        return {"codes": xp.codes(codes, self.code_type), "scale": scale}

    def dequantize(self, parts: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        return parts["codes"].astype(np.float32) * parts["scale"].astype(np.float32)


@dataclass(frozen=True)
class IntAsym(Format):
    """Unsigned codes minus a zero point, times a positive scale; the range of a group always contains zero."""

    def quantize(self, xp: Namespace, w: Any) -> dict[str, Any]:
        highest = float(2**self.bits - 1)
        low, high = xp.minimum(0.0, xp.min(w)), xp.maximum(0.0, xp.max(w))
        scale = _guard(xp, xp.divide(xp.subtract(high, low), highest))
        zero_point = xp.clip(xp.subtract(0.0, xp.round(xp.divide(low, scale))), 0.0, highest)
        codes = xp.clip(xp.round(xp.add(xp.divide(w, scale), zero_point)), 0.0, highest)
        assert self.zero_point_type is not None
        return {
            "codes": xp.codes(codes, self.code_type),
            "scale": scale,
            "zero_point": xp.codes(zero_point, self.zero_point_type),
        }

    def dequantize(self, parts: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        levels = parts["codes"].astype(np.float32) - parts["zero_point"].astype(np.float32)
        return levels * parts["scale"].astype(np.float32)


def _guard(xp: Namespace, scale: Any) -> Any:
    return xp.where(xp.less(xp.abs(scale), EPS), EPS, scale)


register(
    IntAsym("int8_asym", 8, "u8", for_embeddings=True, grouped=False, zero_point_type="u8"),
    IntSym("int8_sym", 8, "i8", for_embeddings=True, grouped=False),
    IntAsym("int4_asym", 4, "u4", for_embeddings=True, grouped=True, zero_point_type="u4"),
    IntSym("int4_sym", 4, "i4", for_embeddings=True, grouped=True),
)
