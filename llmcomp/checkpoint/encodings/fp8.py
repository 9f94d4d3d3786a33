"""FP8 in blocks, as DeepSeek-V3 and Qwen3 publish it: `X.weight` in E4M3 and `X.weight_scale_inv`, which multiplies in spite of its name.

weight             F8_E4M3 (out, in), or a stack (experts, out, in) under another name than weight
weight_scale_inv   float (ceil(out / 128), ceil(in / 128)) for weight_block_size [128, 128]; one number where weight_block_size is null

Source: the technical report of DeepSeek-V3 (arXiv 2412.19437), section 3.3, and `FP8Linear` of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping

from llmcomp.checkpoint.checkpoint import TensorInfo
from llmcomp.checkpoint.encodings.base import FLOATS, MAX_GROUP, DecodedTensor, Encoding, check, check_finite, part, shown, wrong
from llmcomp.checkpoint.encodings.blocks import BlockScaled, grid

SCALE = "_scale_inv"
UNUSED = ("activation_scale", "input_scale")
"""Scales of the inputs, which a weight is not made of."""


class Fp8(Encoding):
    methods = ("fp8",)
    suffixes = (SCALE,)

    def decoded(self, tensors: Mapping[str, TensorInfo]) -> dict[str, DecodedTensor]:
        block = self._block()
        found: dict[str, DecodedTensor] = {}
        for name, info in tensors.items():
            if not info.dtype.startswith("F8_") or name.endswith(SCALE):
                continue
            check(info, ("F8_E4M3",))
            shape = info.shape
            if len(shape) not in (2, 3) or 0 in shape:
                raise wrong(info, f"its shape {list(shape)} is neither a matrix nor a stack of them")
            size = block or (shape[-2], shape[-1])
            shapes = [grid(shape, size)]
            if block is None:
                shapes += [shape[:-2], *([(1,)] if len(shape) == 2 else [])]
            scale = part(tensors, name + SCALE, info, (*FLOATS, "F8_E8M0"), *shapes)
            stem = name.removesuffix("weight") if name.endswith(".weight") else f"{name}_"
            unused = [tensors[stem + end] for end in UNUSED if stem + end in tensors]
            found[name] = BlockScaled(name, info, check_finite(scale), size, unused)
        return found

    def _block(self) -> tuple[int, int] | None:
        value = self.setting("weight_block_size")
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and 0 < n <= MAX_GROUP for n in value):
            raise self.refused(f"weight_block_size {shown(value)} is no pair of sizes")
        return value[0], value[1]
