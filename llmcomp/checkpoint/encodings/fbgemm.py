"""FBGEMM's FP8, as Llama 3.1 405B is published in it: one scale for each row.

weight         F8_E4M3 (out, in)
weight_scale   F32 (out, 1)

Source: `FbgemmFp8Linear` of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping

from llmcomp.checkpoint.checkpoint import TensorInfo
from llmcomp.checkpoint.encodings.base import FLOATS, DecodedTensor, Encoding, check_finite, check_matrix, part
from llmcomp.checkpoint.encodings.blocks import BlockScaled

WEIGHT, SCALE, UNUSED = ".weight", ".weight_scale", ".input_scale_ub"


class Fbgemm(Encoding):
    methods = ("fbgemm_fp8",)
    suffixes = (SCALE,)

    def decoded(self, tensors: Mapping[str, TensorInfo]) -> dict[str, DecodedTensor]:
        found: dict[str, DecodedTensor] = {}
        for name, info in tensors.items():
            if name.endswith(WEIGHT) and info.dtype == "F8_E4M3":
                out, width = check_matrix(info).shape
                stem = name.removesuffix(WEIGHT)
                scale = check_finite(part(tensors, stem + SCALE, info, FLOATS, (out, 1), (out,)))
                unused = [tensors[stem + UNUSED]] if stem + UNUSED in tensors else []
                found[name] = BlockScaled(name, info, scale, (1, width), unused)
        return found
