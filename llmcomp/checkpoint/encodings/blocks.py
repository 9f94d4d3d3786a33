"""Stored numbers of eight bits that share a scale in rectangles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llmcomp.checkpoint.checkpoint import TensorInfo
from llmcomp.checkpoint.encodings.base import DecodedTensor, Rows
from llmcomp.checkpoint.stored import stored_array


def grid(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the scales of a matrix, or of a stack of them; blocks at the lower and the right edge may be cut."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


class BlockScaled(DecodedTensor):
    """w[o, i] = code[o, i] · scale[o // block[0], i // block[1]], rounded to float32."""

    def __init__(self, name: str, codes: TensorInfo, scale: TensorInfo, block: tuple[int, int], others: Sequence[TensorInfo] = ()) -> None:
        super().__init__(name, codes.shape, (codes, scale, *others))
        self.codes, self.scale, self.block = codes, scale, block

    def window(self, index: int | None, rows: Rows, columns: slice) -> NDArray[np.float32]:
        out, width = self.info.shape[-2:]
        codes, scale = stored_array(self.codes), stored_array(self.scale).reshape(grid(self.info.shape, self.block))
        if index is not None:
            codes, scale = codes[index], scale[index]
        values = codes[rows, columns].astype(np.float32)
        down, across = np.arange(out)[rows] // self.block[0], np.arange(width)[columns] // self.block[1]
        values *= np.take(scale[down].astype(np.float32), across, axis=1)
        return values
