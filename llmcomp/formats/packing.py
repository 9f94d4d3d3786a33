"""Codes of fewer than eight bits to bytes and back, as OpenVINO lays them out.

u4, i4, nf4, f4e2m1   element 2i in the low nibble of byte i
u2                    four to a byte, the first in the lowest bits
u1                    eight to a byte, the first in the highest bit
u3                    eight to three bytes: the lower two bits of each in the first two bytes, the first element highest; the upper
                      bits in the third, the first element highest
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.errors import OptionError

BITS = {
    "u1": 1, "u2": 2, "u3": 3, "u4": 4, "i4": 4, "nf4": 4, "f4e2m1": 4, "u8": 8, "i8": 8, "f8e4m3": 8, "f8e5m2": 8, "f8e8m0": 8,
    "u16": 16, "f16": 16, "bf16": 16, "f32": 32, "i32": 32, "i64": 64,
}  # fmt: skip
"""Element types, in OpenVINO's spelling, and their bits."""

NUMBERS = {"f16": np.float16, "f32": np.float32}
"""Types whose items are no codes."""

PIECE = 1 << 15
"""Pairs of nibbles that are packed together: what is in between stays in a core's first caches."""


def bits(element_type: str) -> int:
    """Bits of one element.

    Raises:
        OptionError: unknown element type.
    """
    if element_type not in BITS:
        raise OptionError(f"element type {element_type!r}", "no such stored type", f"Use one of {', '.join(BITS)}")
    return BITS[element_type]


def packed_bytes(shape: tuple[int, ...], element_type: str) -> int:
    """Bytes of a packed array; the last byte, of u3 the last three, may be part empty."""
    if element_type == "u3":
        return -(-prod(shape) // 8) * 3
    return -(-prod(shape) * bits(element_type) // 8)


def pack(codes: NDArray[Any], element_type: str) -> NDArray[np.uint8]:
    """One element per item -> the stored bytes, 1-D, elements in row-major order. Signed codes are two's complement.

    May return a view of `codes`. Values outside the type's range lose their upper bits.
    """
    width = bits(element_type)
    flat = np.ascontiguousarray(codes).reshape(-1)
    if width >= 8:
        return flat.view(np.uint8)
    flat = flat.view(np.uint8)
    if width == 4:
        return _pack_nibbles(flat, element_type.startswith("i"))
    flat = np.append(flat, np.zeros(-flat.size % 8, np.uint8)) if flat.size % 8 else flat
    if width == 1:
        return np.packbits(flat)
    if width == 2:
        return _pack_pairs(flat)[: packed_bytes(codes.shape, element_type)]
    packed = np.empty((flat.size // 8, 3), np.uint8)
    packed[:, :2] = _pack_pairs(flat.reshape(-1, 4)[:, ::-1].reshape(-1) & np.uint8(3)).reshape(-1, 2)
    packed[:, 2] = np.packbits(flat >> 2)
    return packed.reshape(-1)


def _pack_nibbles(flat: NDArray[np.uint8], signed: bool) -> NDArray[np.uint8]:
    if flat.size % 2:
        flat = np.append(flat, np.uint8(0))
    if flat.ctypes.data % 2:
        flat = flat.copy()
    # A pair read as one 16-bit word needs no strided access: low byte is element 2i on little-endian machines.
    pairs = flat.view("<u2")
    packed = np.empty(pairs.size, np.uint8)
    high, low = np.empty(min(PIECE, pairs.size), np.uint16), np.empty(min(PIECE, pairs.size), np.uint16)
    for start in range(0, pairs.size, PIECE):
        pair = pairs[start : start + PIECE]
        h, count = high[: pair.size], pair.size
        np.right_shift(pair, 4, out=h)
        if signed:
            h &= 0xF0
            h |= np.bitwise_and(pair, 0x0F, out=low[:count])
        else:
            h |= pair
        packed[start : start + count] = h
    return packed


def _pack_pairs(flat: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two bits of each element, four elements to a byte, the first lowest."""
    packed = np.zeros(flat.size // 4, np.uint8)
    for i in range(4):
        packed |= flat[i::4] << np.uint8(2 * i)
    return packed


def unpack(data: NDArray[np.uint8], element_type: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """The stored bytes -> one code per item: int8 for `i` types, uint16 for u16, floats for f16 and f32, uint8 otherwise."""
    width = bits(element_type)
    count = prod(shape)
    signed = element_type.startswith("i")
    if width >= 8:
        return data.view(NUMBERS.get(element_type, np.int8 if signed else np.uint16 if width == 16 else np.uint8)).reshape(shape)
    if width == 1:
        return np.unpackbits(data)[:count].reshape(shape)
    if width == 2:
        return _unpack_pairs(data)[:count].reshape(shape)
    if width == 3:
        triple = data.reshape(-1, 3)
        lower = _unpack_pairs(np.ascontiguousarray(triple[:, :2]).reshape(-1)).reshape(-1, 4)[:, ::-1].reshape(-1)
        upper = np.unpackbits(np.ascontiguousarray(triple[:, 2]))
        return (lower | upper << 2)[:count].reshape(shape)
    both = np.empty((data.size, 2), np.uint8)
    both[:, 0] = data & 0x0F
    both[:, 1] = data >> 4
    codes: NDArray[Any] = both.reshape(-1)[:count].reshape(shape)
    if signed:
        # Sign extension: 8..15 are -8..-1.
        codes = (codes ^ 8).view(np.int8) - np.int8(8)
    return codes


def _unpack_pairs(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.stack([data >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1).reshape(-1)
