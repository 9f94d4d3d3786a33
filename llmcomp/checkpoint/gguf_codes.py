"""The blocks of GGML's types in the codes of our formats.

A block is a run of a row. Types with a scale alone are integers or a table's numbers times it; those with a minimum beside it,
w = scale · code - minimum, have a zero point of minimum / scale, which is no integer.

Source: the types as `ggml-common.h` of llama.cpp declares them, and the decoders of the package gguf, to which tests compare.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp import formats
from llmcomp.checkpoint.encoded import Encoded, Form, Held, Lines, scale_type
from llmcomp.formats.codebook import make_codebook

Bytes = NDArray[np.uint8]
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Levels of IQ4_NL and IQ4_XS."""
CHUNK = 1 << 22
"""Weights whose scales are looked at together."""


@dataclass(frozen=True)
class Unpacked:
    """Blocks [n, bytes] taken apart."""

    codes: NDArray[Any]
    """[n, weights], codes of the format."""
    scale: NDArray[np.float32]
    """[n, groups]"""
    minimum: NDArray[np.float32] | None = None
    """[n, groups], what is subtracted."""


@dataclass(frozen=True)
class Kind:
    """A type whose codes a format holds."""

    name: str
    size: int
    """Weights that share a scale."""
    unpack: Callable[[Bytes], Unpacked]
    narrow: bool = False
    """Its scales are f16 by definition."""


def _f16(blocks: Bytes, at: int) -> NDArray[np.float32]:
    """[n, 1]"""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(data: Bytes) -> Bytes:
    """[n, bytes] -> [n, 2 · bytes]: the low ones of all bytes, then the high ones."""
    return np.concatenate([data & 15, data >> 4], axis=1)


def _halves(data: Bytes) -> Bytes:
    """[n, bytes] -> [n, 2 · bytes]: as `_nibbles`, of each 32 bytes."""
    return _nibbles(data.reshape(-1, 32)).reshape(len(data), -1)


def _fields(data: Bytes, width: int) -> Bytes:
    """[n, bytes] -> [n, bytes · 8 / width]: the lowest `width` bits of each 32 bytes, then the next ones."""
    rows = data.reshape(-1, 32)
    fields = [rows >> shift & ((1 << width) - 1) for shift in range(0, 8, width)]
    return np.concatenate(fields, axis=1).reshape(len(data), -1)


def _bits(data: Bytes) -> Bytes:
    """[n, 4] -> [n, 32]: bits of a word, the lowest first."""
    return np.unpackbits(data, axis=1, bitorder="little")


def _scales_and_minima(data: Bytes) -> tuple[Bytes, Bytes]:
    """[n, 12] -> twice [n, 8]: six bits each; those of the last four have their upper two bits above the first four's."""
    low, middle, high = data[:, :4], data[:, 4:8], data[:, 8:]
    scale = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=1)
    return scale, np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=1)


def _q4_0(b: Bytes) -> Unpacked:
    return Unpacked(_nibbles(b[:, 2:]).astype(np.int8) - np.int8(8), _f16(b, 0))


def _q4_1(b: Bytes) -> Unpacked:
    return Unpacked(_nibbles(b[:, 4:]), _f16(b, 0), -_f16(b, 2))


def _q5_0(b: Bytes) -> Unpacked:
    return Unpacked((_nibbles(b[:, 6:]) | _bits(b[:, 2:6]) << 4).astype(np.int8) - np.int8(16), _f16(b, 0))


def _q5_1(b: Bytes) -> Unpacked:
    return Unpacked(_nibbles(b[:, 8:]) | _bits(b[:, 4:8]) << 4, _f16(b, 0), -_f16(b, 2))


def _q8_0(b: Bytes) -> Unpacked:
    return Unpacked(b[:, 2:].view(np.int8), _f16(b, 0))


def _q2_k(b: Bytes) -> Unpacked:
    both = b[:, :16]
    return Unpacked(_fields(b[:, 16:80], 2), _f16(b, 80) * (both & 15), _f16(b, 82) * (both >> 4))


def _q3_k(b: Bytes) -> Unpacked:
    packed = b[:, 96:108]
    low, high = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1), packed[:, 8:]
    upper = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
    scale = (low | upper << 4).astype(np.int8) - np.int8(32)
    codes = (_fields(b[:, 32:96], 2) | _fields(b[:, :32], 1) << 2).astype(np.int8) - np.int8(4)
    return Unpacked(codes, _f16(b, 108) * scale)


def _q4_k(b: Bytes) -> Unpacked:
    scale, minimum = _scales_and_minima(b[:, 4:16])
    return Unpacked(_halves(b[:, 16:]), _f16(b, 0) * scale, _f16(b, 2) * minimum)


def _q5_k(b: Bytes) -> Unpacked:
    scale, minimum = _scales_and_minima(b[:, 4:16])
    return Unpacked(_halves(b[:, 48:]) | _fields(b[:, 16:48], 1) << 4, _f16(b, 0) * scale, _f16(b, 2) * minimum)


def _q6_k(b: Bytes) -> Unpacked:
    low, high = b[:, :128].reshape(-1, 64), b[:, 128:192]
    codes = _nibbles(low).reshape(len(b), -1) | _fields(high, 2) << 4
    return Unpacked(codes.astype(np.int8) - np.int8(32), _f16(b, 208) * b[:, 192:208].view(np.int8))


def _iq4_nl(b: Bytes) -> Unpacked:
    return Unpacked(_nibbles(b[:, 2:]), _f16(b, 0))


def _iq4_xs(b: Bytes) -> Unpacked:
    low = b[:, 4:8]
    upper = np.ascontiguousarray(b[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scale = (np.stack([low & 15, low >> 4], axis=2).reshape(len(b), -1) | upper << 4).astype(np.int8) - np.int8(32)
    return Unpacked(_nibbles(b[:, 8:].reshape(-1, 16)).reshape(len(b), -1), _f16(b, 0) * scale)


TABLE = make_codebook(IQ4).name
KINDS = {
    2: Kind("int4_sym", 32, _q4_0, narrow=True),
    3: Kind("offset[4]", 32, _q4_1, narrow=True),
    6: Kind("int8_sym", 32, _q5_0, narrow=True),
    7: Kind("offset[8]", 32, _q5_1, narrow=True),
    8: Kind("int8_sym", 32, _q8_0, narrow=True),
    10: Kind("offset[4]", 16, _q2_k),
    11: Kind("int4_sym", 16, _q3_k),
    12: Kind("offset[4]", 32, _q4_k),
    13: Kind("offset[8]", 32, _q5_k),
    14: Kind("int8_sym", 16, _q6_k),
    20: Kind(TABLE, 32, _iq4_nl, narrow=True),
    23: Kind(TABLE, 32, _iq4_xs),
}
"""By GGML's number of the type."""


class GGUFCodes(Encoded):
    """A tensor [out, in] of a .gguf file."""

    def __init__(self, number: int, label: str, shape: tuple[int, ...], block_bytes: int, rows: Callable[[int, int], Bytes]) -> None:
        """`rows(start, stop)` -> the bytes of these rows [rows, bytes]."""
        self.kind, self.method, self.shape, self.block_bytes, self.rows = KINDS.get(number), label, shape, block_bytes, rows

    @cached_property
    def held(self) -> Held:
        if self.kind is None:
            return Held((), "its blocks are not repacked")
        name = self.kind.name
        if not self.kind.narrow:
            return Held((Form(name, self.kind.size, "f32"),))
        narrow = Form(name, self.kind.size, "f16")
        fmt, step = formats.get(name), max(1, CHUNK // max(1, self.shape[1]))
        for start in range(0, self.shape[0], step):
            if scale_type(fmt, self.lines(narrow, None, start, min(start + step, self.shape[0])).scale) == "f32":
                return Held((Form(name, self.kind.size, "f32"),))
        return Held((narrow,))

    def lines(self, form: Form, index: int | None, start: int, stop: int) -> Lines:
        assert self.kind is not None
        raw = self.rows(start, stop)
        with np.errstate(invalid="ignore"):
            parts = self.kind.unpack(raw.reshape(-1, self.block_bytes))
        codes, scale = parts.codes.reshape(len(raw), -1), parts.scale.reshape(len(raw), -1)
        if parts.minimum is None:
            return Lines(codes, scale)
        minimum = parts.minimum.reshape(len(raw), -1)
        # Without a scale all weights of a group are its minimum: code 0 less a zero point of one, times it.
        flat = scale == 0
        with np.errstate(over="ignore", invalid="ignore"):
            zeros = np.divide(minimum, scale, out=np.ones_like(scale), where=~flat)
        codes = np.where(np.repeat(flat, form.group_size, axis=1), 0, codes).astype(np.uint8)
        return Lines(codes, np.where(flat, minimum, scale), zeros)
