"""Stored numbers of eight bits that share a scale in rectangles."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from llmcomp.checkpoint.checkpoint import TensorInfo
from llmcomp.checkpoint.encoded import Form, Held, Lines, held, run_length
from llmcomp.checkpoint.encodings.base import DecodedTensor, Rows
from llmcomp.checkpoint.stored import stored_array


def grid(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the scales of a matrix, or of a stack of them; blocks at the lower and the right edge may be cut."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


class BlockScaled(DecodedTensor):
    """w[o, i] = code[o, i] · scale[o // block[0], i // block[1]], rounded to float32."""

    def __init__(self, name: str, codes: TensorInfo, scale: TensorInfo, block: tuple[int, int], others: Sequence[TensorInfo] = ()) -> None:
        super().__init__(name, codes.shape, (codes, scale, *others))
        self.codes, self.scale = codes, scale
        self.block = min(block[0], codes.shape[-2]), min(block[1], codes.shape[-1])

    def decode(self, index: int | None, rows: Rows, columns: slice) -> NDArray[np.float32]:
        out, width = self.info.shape[-2:]
        codes, scale = stored_array(self.codes), stored_array(self.scale).reshape(grid(self.info.shape, self.block))
        if index is not None:
            codes, scale = codes[index], scale[index]
        down, wide = self.block
        factors = scale[np.arange(out)[rows] // down].astype(np.float32)
        first, last, _ = columns.indices(width)
        start = first // wide
        spread = np.repeat(factors[:, start : -(-last // wide)], wide, axis=1)[:, first - start * wide : last - start * wide]
        values = _floats(codes[rows, columns])
        values *= spread
        return values

    @cached_property
    def held(self) -> Held:
        size = run_length(np.arange(self.info.shape[-1]) // self.block[1])
        if size is None:
            return Held((), f"blocks of {self.block[1]} columns are no runs of a power of two in rows of {self.info.shape[-1]}")
        return held(["fp8_e4m3" if self.codes.dtype == "F8_E4M3" else "int8_sym"], size, stored_array(self.scale))

    def lines(self, form: Form, index: int | None, start: int, stop: int) -> Lines:
        codes, scale = stored_array(self.codes), stored_array(self.scale).reshape(grid(self.info.shape, self.block))
        if index is not None:
            codes, scale = codes[index], scale[index]
        width = self.info.shape[-1]
        columns = np.arange(0, width, width if form.group_size == -1 else form.group_size) // self.block[1]
        rows = np.arange(start, stop) // self.block[0]
        kept = codes[start:stop]
        return Lines(kept.view(np.uint8) if form.format == "fp8_e4m3" else kept, scale[rows][:, columns].astype(np.float32))


E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
"""The value of each code; looking it up is twice as fast as converting."""


def _floats(codes: NDArray[Any]) -> NDArray[np.float32]:
    return np.take(E4M3, codes.view(np.uint8), mode="clip") if codes.dtype == ml_dtypes.float8_e4m3fn else codes.astype(np.float32)
