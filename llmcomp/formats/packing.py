"""Codes of fewer than eight bits to bytes and back, as OpenVINO lays them out: element 2i in the low nibble of byte i."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.errors import OptionError

BITS = {
    "u1": 1, "u2": 2, "u4": 4, "i4": 4, "nf4": 4, "f4e2m1": 4, "u8": 8, "i8": 8, "f8e4m3": 8, "f8e5m2": 8, "f8e8m0": 8,
    "u16": 16, "f16": 16, "bf16": 16, "f32": 32, "i32": 32, "i64": 64,
}  # fmt: skip
"""Element types, in OpenVINO's spelling, and their bits."""


def bits(element_type: str) -> int:
    """Bits of one element.

    Raises:
        OptionError: unknown element type.
    """
    if element_type not in BITS:
        raise OptionError(f"element type {element_type!r}", "no such stored type", f"Use one of {', '.join(BITS)}")
    return BITS[element_type]


def packed_bytes(shape: tuple[int, ...], element_type: str) -> int:
    """Bytes of a packed array; the last byte may be part empty."""
    return -(-prod(shape) * bits(element_type) // 8)


def pack(codes: NDArray[Any], element_type: str) -> NDArray[np.uint8]:
    """One element per item -> the stored bytes, 1-D, elements in row-major order. Signed codes are two's complement.

    May return a view of `codes`. Values outside the type's range lose their upper bits.
    """
    width = bits(element_type)
    flat = np.ascontiguousarray(codes).reshape(-1)
    if width >= 8:
        return flat.view(np.uint8)
    if width != 4:
        raise OptionError(f"element type {element_type!r}", "packing is known for 4 bits only", "Use a 4-bit type")
    flat = flat.view(np.uint8)
    if flat.size % 2:
        flat = np.append(flat, np.uint8(0))
    if flat.ctypes.data % 2:
        flat = flat.copy()
    # A pair read as one 16-bit word needs no strided access: low byte is element 2i on little-endian machines.
    pair = flat.view("<u2")
    high = pair >> 4
    if element_type.startswith("i"):
        high &= 0xF0
        high |= pair & 0x0F
    else:
        high |= pair
    return high.astype(np.uint8)


def unpack(data: NDArray[np.uint8], element_type: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """The stored bytes of a 4- or 8-bit type -> one code per byte: int8 for `i` types, uint8 otherwise."""
    width = bits(element_type)
    signed = element_type.startswith("i")
    if width == 8:
        return data.view(np.int8 if signed else np.uint8).reshape(shape)
    if width != 4:
        raise OptionError(f"element type {element_type!r}", "unpacking is known for 4 and 8 bits only", "Use such a type")
    both = np.empty((data.size, 2), np.uint8)
    both[:, 0] = data & 0x0F
    both[:, 1] = data >> 4
    codes: NDArray[Any] = both.reshape(-1)[: prod(shape)].reshape(shape)
    if signed:
        # Sign extension: 8..15 are -8..-1.
        codes = (codes ^ 8).view(np.int8) - np.int8(8)
    return codes
