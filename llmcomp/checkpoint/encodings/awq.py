"""AWQ in AutoAWQ's layout `gemm`, turned: the rows of a weight are columns here, eight of 4 bits to a word.

qweight   I32 (in, out / 8)
qzeros    I32 (groups, out / 8)
scales    float (groups, out)

The nibbles of a word, the lowest first, are columns 0, 2, 4, 6, 1, 3, 5, 7 of its eight.

Source: Lin et al. 2023 (arXiv 2306.00978) for the method, AutoAWQ's `WQLinear_GEMM` for the layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.checkpoint.checkpoint import TensorInfo
from llmcomp.checkpoint.encodings.base import FLOATS, DecodedTensor, Encoding, Rows, check, check_finite, check_matrix, part, shown, wrong
from llmcomp.checkpoint.encodings.groups import Grouped, codes_at, in_order
from llmcomp.checkpoint.stored import stored_array

CODES, ZEROS, SCALES = ".qweight", ".qzeros", ".scales"
PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""The nibble in which each of eight columns stands."""


class Awq(Encoding):
    methods = ("awq",)
    suffixes = (CODES, ZEROS)

    def __init__(self, settings: Mapping[str, Any], config: Path) -> None:
        super().__init__(settings, config)
        self.number("bits", "w_bit", default=4, allowed=(4,))
        self.size = self.group_size("group_size", "q_group_size")
        version = self.setting("version", "format", default="gemm")
        if not isinstance(version, str) or version.lower() != "gemm" or self.setting("backend") == "llm-awq":
            raise self.refused(f"version {shown(version)} of backend {shown(self.setting('backend'))} is not read, only gemm of AutoAWQ")

    def decoded(self, tensors: Mapping[str, TensorInfo]) -> dict[str, DecodedTensor]:
        stems = [name.removesuffix(CODES) for name in tensors if name.endswith(CODES)]
        return {f"{stem}.weight": self._matrix(stem, tensors) for stem in stems}

    def _matrix(self, stem: str, tensors: Mapping[str, TensorInfo]) -> DecodedTensor:
        codes = check_matrix(check(tensors[stem + CODES], ("I32",)))
        width, words = codes.shape
        size = width if self.size == -1 else self.size
        if width % size:
            raise wrong(codes, f"groups of {size} do not divide its {width} inputs")
        zeros = part(tensors, stem + ZEROS, codes, ("I32",), (width // size, words))
        scales = part(tensors, stem + SCALES, codes, FLOATS, (width // size, words * 8))
        return _Matrix(f"{stem}.weight", (words * 8, width), [codes, zeros, check_finite(scales)], in_order(width, size))


class _Matrix(Grouped):
    turned = True
    span = (0, 15)

    def __init__(self, name: str, shape: tuple[int, ...], parts: list[TensorInfo], group: NDArray[np.int64]) -> None:
        super().__init__(name, shape, parts, group)
        self.stored = parts

    def codes(self, rows: Rows, columns: slice) -> NDArray[Any]:
        return self._nibbles(stored_array(self.stored[0])[columns], rows)

    def zeros(self, rows: Rows) -> NDArray[Any]:
        return self._nibbles(stored_array(self.stored[1]), rows)

    def scales(self, rows: Rows) -> NDArray[Any]:
        return stored_array(self.stored[2])[:, rows].T

    def _nibbles(self, words: NDArray[np.int32], rows: Rows) -> NDArray[Any]:
        """(rows, lines of words)"""
        if not isinstance(rows, slice):
            return codes_at(words, rows // 8 * 8 + PLACES[rows % 8], 4).T
        start, stop, _ = rows.indices(self.info.shape[0])
        first = start // 8
        turned = np.ascontiguousarray(words[:, first : -(-stop // 8)].T).view(np.uint32)
        codes = np.empty((len(turned), 8, len(words)), np.uint8)
        for column, place in enumerate(PLACES):
            codes[:, column] = turned >> np.uint32(4 * place) & np.uint32(15)
        return codes.reshape(-1, len(words))[start - 8 * first : stop - 8 * first]
