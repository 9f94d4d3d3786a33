"""MXFP4 and MXFP8 matrices: E2M1 or E4M3 codes, 32 of which share a power of two.

Source: OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp import formats
from llmcomp.checkpoint.checkpoint import TensorInfo
from llmcomp.checkpoint.encoded import Form, Held, Lines
from llmcomp.checkpoint.encodings.base import LOOKED_AT, DecodedTensor, Rows, check, check_matrix, wrong
from llmcomp.checkpoint.stored import stored_array

SIZE = 32
"""Columns that share a scale."""
NAN = 255
"""The exponent that stands for no number."""


class PowerScaled(DecodedTensor):
    """w[o, i] = code[o, i] · 2^(exponent[o, i // 32] - 127), in float32."""

    def __init__(self, name: str, codes: TensorInfo, scale: TensorInfo, others: Sequence[TensorInfo]) -> None:
        """`codes` U8 (out, in / 2), the first in the low nibble, or F8_E4M3 (out, in); `scale` U8 (out, in / 32).

        Raises:
            CheckpointError: they are not of these types and shapes, or a scale is NaN.
        """
        out, width = check_matrix(check(codes, ("U8", "F8_E4M3"))).shape
        self.format = formats.get("mxfp4" if codes.dtype == "U8" else "mxfp8_e4m3")
        width *= 8 // self.format.bits
        if width % SIZE:
            raise wrong(codes, f"groups of {SIZE} do not divide its {width} inputs")
        check(scale, ("U8",), (out, width // SIZE))
        bad = stored_array(scale).reshape(-1)[:LOOKED_AT] == NAN
        if bad.any():
            raise wrong(scale, f"scale {int(np.argmax(bad))} is NaN")
        super().__init__(name, (out, width), [codes, scale, *others])
        self.codes, self.scale = codes, scale

    def decode(self, index: int | None, rows: Rows, columns: slice) -> NDArray[np.float32]:
        codes, scale = self._codes(rows), self._scales(rows)
        values = self.format.decode(formats.NUMPY, codes.reshape(*scale.shape, SIZE), scale[..., None])
        return np.asarray(values.reshape(codes.shape)[:, columns], np.float32)

    @cached_property
    def held(self) -> Held:
        return Held((Form(self.format.name, SIZE, "f32"),))

    def lines(self, form: Form, index: int | None, start: int, stop: int) -> Lines:
        rows = slice(start, stop)
        return Lines(self._codes(rows), self._scales(rows))

    def _codes(self, rows: Rows) -> NDArray[Any]:
        raw = np.ascontiguousarray(stored_array(self.codes)[rows])
        kind = self.format.code_type
        return formats.unpack(raw.view(np.uint8).reshape(-1), kind, (len(raw), self.info.shape[1]))

    def _scales(self, rows: Rows) -> NDArray[np.float32]:
        exponents = stored_array(self.scale)[rows]
        return np.where(exponents == NAN, np.float32(np.nan), self.format.load_scale({"scale": exponents}))
