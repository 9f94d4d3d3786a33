"""NVFP4: E2M1 codes, sixteen of which share a scale in E4M3, and all of a weight one more."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from llmcomp import formats
from llmcomp.checkpoint.checkpoint import TensorInfo
from llmcomp.checkpoint.encoded import Form, Held, Lines, held
from llmcomp.checkpoint.encodings.base import ALL, DecodedTensor, Rows, check, check_finite, check_matrix, wrong
from llmcomp.checkpoint.stored import stored_array
from llmcomp.formats import e2m1

SIZE = 16
"""Columns that share a scale."""


class TwoScales(DecodedTensor):
    """w[o, i] = code[o, i] · (scale[o, i // 16] · second), each product rounded to float32."""

    def __init__(
        self, name: str, codes: TensorInfo, scale: TensorInfo, second: TensorInfo, inverse: bool, others: Sequence[TensorInfo]
    ) -> None:
        """`codes` U8 (out, in / 2), the first in the low nibble; `scale` F8_E4M3 (out, in / 16); `second` F32, which divides if `inverse`.

        Raises:
            CheckpointError: they are not of these types and shapes, or `second` is not positive.
        """
        out, width = check_matrix(check(codes, ("U8",))).shape[0], codes.shape[1] * 2
        if width % SIZE:
            raise wrong(codes, f"groups of {SIZE} do not divide its {width} inputs")
        check_finite(check(scale, ("F8_E4M3",), (out, width // SIZE)))
        check_finite(check(second, ("F32",), (), (1,)))
        super().__init__(name, (out, width), [codes, scale, second, *others])
        self.codes, self.scale = codes, scale
        value = stored_array(second).reshape(-1)[0]
        with np.errstate(all="ignore"):
            self.second = float(np.float32(1) / value if inverse else value)
        if not 0 < self.second < np.inf:
            raise wrong(second, f"{value:g} is no scale of a whole weight")

    def decode(self, index: int | None, rows: Rows, columns: slice) -> NDArray[np.float32]:
        values = e2m1.decode(formats.NUMPY, self._codes(rows)) * np.repeat(self._scales(rows), SIZE, axis=1)
        return np.asarray(values[:, columns], np.float32)

    @cached_property
    def held(self) -> Held:
        return Held((Form("nvfp4", SIZE, "f32"), *held(["fp4"], SIZE, self._scales(ALL)).forms))

    def lines(self, form: Form, index: int | None, start: int, stop: int) -> Lines:
        rows = slice(start, stop)
        return Lines(self._codes(rows), self._scales(rows))

    def _codes(self, rows: Rows) -> NDArray[np.uint8]:
        raw = np.ascontiguousarray(stored_array(self.codes)[rows])
        return formats.unpack(raw.reshape(-1), "f4e2m1", (len(raw), self.info.shape[1]))

    def _scales(self, rows: Rows) -> NDArray[np.float32]:
        with np.errstate(over="ignore"):
            return stored_array(self.scale)[rows].astype(np.float32) * np.float32(self.second)
