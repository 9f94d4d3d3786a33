"""MXFP4 stacks of experts, as gpt-oss publishes them: each expert's matrix is stored (out, in), and its parameter is turned, (in, out).

X_blocks   U8 (experts, out, in / 32, 16)   E2M1, two to a byte, the first in the low nibble
X_scales   U8 (experts, out, in / 32)       exponents with bias 127; 255 is NaN
X          (experts, in, out)               gate_up_proj or down_proj

Source: OCP Microscaling Formats 1.0, and the model card of gpt-oss (arXiv 2508.10925), section 2.1.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from llmcomp import formats
from llmcomp.checkpoint.checkpoint import TensorInfo
from llmcomp.checkpoint.encoded import Form, Held, Lines
from llmcomp.checkpoint.encodings.base import LOOKED_AT, DecodedTensor, Encoding, Rows, check, part, wrong
from llmcomp.checkpoint.stored import stored_array

BLOCKS, SCALES = "_blocks", "_scales"
SIZE = 32
"""Columns that share a scale."""
NAN = 255


class Mxfp4(Encoding):
    methods = ("mxfp4",)
    suffixes = (BLOCKS, SCALES)

    def decoded(self, tensors: Mapping[str, TensorInfo]) -> dict[str, DecodedTensor]:
        names = [name.removesuffix(BLOCKS) for name in tensors if name.endswith(BLOCKS)]
        return {name: self._stack(name, tensors) for name in names}

    def _stack(self, name: str, tensors: Mapping[str, TensorInfo]) -> DecodedTensor:
        blocks = check(tensors[name + BLOCKS], ("U8",))
        if len(blocks.shape) != 4 or blocks.shape[3] != SIZE // 2 or 0 in blocks.shape:
            raise wrong(blocks, f"its shape {list(blocks.shape)} is no stack of matrices in blocks of {SIZE // 2} bytes")
        scales = part(tensors, name + SCALES, blocks, ("U8",), blocks.shape[:3])
        bad = stored_array(scales).reshape(-1)[:LOOKED_AT] == NAN
        if bad.any():
            raise wrong(scales, f"scale {int(np.argmax(bad))} is NaN")
        return _Stack(name, blocks, scales)


class _Stack(DecodedTensor):
    crosswise = True
    held = Held((Form("mxfp4", SIZE, "f32"),))

    def __init__(self, name: str, blocks: TensorInfo, scales: TensorInfo) -> None:
        experts, out, groups, _ = blocks.shape
        super().__init__(name, (experts, groups * SIZE, out), (blocks, scales))
        self.blocks, self.scales = blocks, scales

    def decode(self, index: int | None, rows: Rows, columns: slice) -> NDArray[np.float32]:
        assert index is not None
        blocks, scales = stored_array(self.blocks)[index, columns], stored_array(self.scales)[index, columns]
        codes, scale = _unpacked(blocks, scales)
        values = formats.get("mxfp4").decode(formats.NUMPY, codes, scale[..., None])
        turned: NDArray[np.float32] = values.reshape(len(blocks), self.info.shape[1]).T[rows]
        return turned

    def lines(self, form: Form, index: int | None, start: int, stop: int) -> Lines:
        codes, scale = _unpacked(stored_array(self.blocks)[index, start:stop], stored_array(self.scales)[index, start:stop])
        return Lines(codes.reshape(len(codes), -1), scale)


def _unpacked(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """(codes [rows, groups, SIZE], scales [rows, groups])"""
    codes = formats.unpack(np.ascontiguousarray(blocks).reshape(-1), "f4e2m1", (*blocks.shape[:2], SIZE))
    return codes, np.where(scales == NAN, np.float32(np.nan), formats.get("mxfp4").load_scale({"scale": scales}))
