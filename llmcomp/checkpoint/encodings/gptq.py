"""GPTQ, as AutoGPTQ and GPTQModel store it, turned: the rows of a weight are columns here.

qweight   I32 (in · bits / 32, out)       codes of a column below each other, the lowest bits first
qzeros    I32 (groups, out · bits / 32)   zero points, less one modulo 2^bits unless checkpoint_format is gptq_v2
scales    float (groups, out)
g_idx     I32 (in)                        the group of each input; without it they are in order

With 3 bits a code may stand in two words: 32 of them are 96 bits in a row.

Source: Frantar et al. 2022 (arXiv 2210.17323) for the method, the documentation of GPTQModel for `checkpoint_format` and `dynamic`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.checkpoint.checkpoint import TensorInfo
from llmcomp.checkpoint.encodings.base import (
    FLOATS,
    DecodedTensor,
    Encoding,
    Rows,
    check,
    check_finite,
    check_groups,
    check_matrix,
    part,
    shown,
    wrong,
)
from llmcomp.checkpoint.encodings.groups import Grouped, codes_at, first_codes, in_order
from llmcomp.checkpoint.stored import stored_array

BITS = (2, 3, 4, 8)
FORMATS = {"gptq": 1, "gptq_v2": 0}
"""checkpoint_format -> what zero points are stored less."""
CODES, ZEROS, SCALES, GROUPS = ".qweight", ".qzeros", ".scales", ".g_idx"


class Gptq(Encoding):
    methods = ("gptq",)
    suffixes = (CODES, ZEROS, GROUPS)

    def __init__(self, settings: Mapping[str, Any], config: Path) -> None:
        super().__init__(settings, config)
        self.bits = self.number("bits", default=None, allowed=BITS)
        self.size = self.group_size("group_size")
        self.mixed = bool(self.setting("dynamic"))
        """Layers have settings of their own, which their shapes tell."""
        name = self.setting("checkpoint_format", "format", default="gptq")
        if not isinstance(name, str) or name not in FORMATS or self.setting("is_marlin_format"):
            raise self.refused(f"checkpoint_format {shown(name)} is not read, only {', '.join(FORMATS)}, and nothing packed for Marlin")
        self.less = FORMATS[name]

    def decoded(self, tensors: Mapping[str, TensorInfo]) -> dict[str, DecodedTensor]:
        stems = [name.removesuffix(CODES) for name in tensors if name.endswith(CODES)]
        return {f"{stem}.weight": self._matrix(stem, tensors) for stem in stems}

    def _matrix(self, stem: str, tensors: Mapping[str, TensorInfo]) -> DecodedTensor:
        codes = check_matrix(check(tensors[stem + CODES], ("I32",)))
        order = tensors.get(stem + GROUPS)
        words, out = codes.shape
        bits, width = self.bits, words * 32 // self.bits
        if order is not None:
            check(order, ("I32",))
            width = order.shape[0] if len(order.shape) == 1 else 0
            if self.mixed and width:
                bits = words * 32 // width
        if bits not in BITS or width * bits != words * 32:
            raise wrong(codes, f"its {words} rows of 32 bits are no {width} inputs of {bits} bits")
        scales = check_matrix(part(tensors, stem + SCALES, codes, FLOATS))
        groups = scales.shape[0]
        check(scales, FLOATS, (groups, out))
        if out * bits % 32:
            raise wrong(codes, f"its {out} columns of {bits} bits fill no whole words of zero points")
        zeros = part(tensors, stem + ZEROS, codes, ("I32",), (groups, out * bits // 32))
        if order is not None:
            group = check_groups(order, groups)
        else:
            if self.setting("desc_act"):
                raise wrong(codes, f"{stem}{GROUPS}, which says the order of desc_act, is not in the checkpoint")
            group = in_order(width, self.size)
            if group[-1] + 1 != groups:
                raise wrong(scales, f"it has {groups} groups, and {width} inputs in groups of {self.size} are {group[-1] + 1}")
        parts = [codes, zeros, check_finite(scales), *([order] if order is not None else [])]
        return _Matrix(f"{stem}.weight", (out, width), parts, group, bits, self.less)


class _Matrix(Grouped):
    turned = True

    def __init__(self, name: str, shape: tuple[int, ...], parts: list[TensorInfo], group: NDArray[np.int64], bits: int, less: int) -> None:
        super().__init__(name, shape, parts, group)
        self.stored, self.bits, self.less = parts, bits, less
        self.span = (0, (1 << bits) - 1)

    def codes(self, rows: Rows, columns: slice) -> NDArray[Any]:
        return first_codes(stored_array(self.stored[0])[:, rows].T, self.bits, self.info.shape[1])[:, columns]

    def zeros(self, rows: Rows) -> NDArray[Any]:
        numbers = np.arange(self.info.shape[0])[rows]
        return (codes_at(stored_array(self.stored[1]), numbers, self.bits).T + np.uint8(self.less)) & np.uint8((1 << self.bits) - 1)

    def scales(self, rows: Rows) -> NDArray[Any]:
        return stored_array(self.stored[2])[:, rows].T
