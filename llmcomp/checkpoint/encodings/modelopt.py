"""TensorRT Model Optimizer: FP8 with one scale for a weight, and NVFP4. A checkpoint may have both, and each tensor's type tells.

weight           F8_E4M3 (out, in), or U8 (out, in / 2): two E2M1 to a byte, the first in the low nibble
weight_scale     F32 () beside FP8, F8_E4M3 (out, in / 16) beside NVFP4
weight_scale_2   F32 (), NVFP4 alone: what all scales are multiplied by

Source: the checkpoints that NVIDIA publishes, with `hf_quant_config.json` beside config.json or its content in quantization_config.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmcomp.checkpoint.checkpoint import TensorInfo
from llmcomp.checkpoint.encodings.base import DecodedTensor, Encoding, check_finite, check_matrix, part, shown
from llmcomp.checkpoint.encodings.blocks import BlockScaled
from llmcomp.checkpoint.encodings.two_scales import TwoScales

WEIGHT, SCALE, SECOND = ".weight", ".weight_scale", ".weight_scale_2"
UNUSED = (".input_scale", ".k_scale", ".v_scale")
"""Scales of inputs and of the cache, which a weight is not made of."""
ALGORITHMS = ("FP8", "NVFP4", "MIXED_PRECISION")


class ModelOpt(Encoding):
    methods = ("modelopt", "modelopt_fp4")
    suffixes = (SCALE, SECOND)

    def __init__(self, settings: Mapping[str, Any], config: Path) -> None:
        super().__init__(settings, config)
        nested = self.setting("quantization", default={})
        algorithm = self.setting("quant_algo", default=nested.get("quant_algo") if isinstance(nested, dict) else None)
        if algorithm not in ALGORITHMS:
            raise self.refused(f"quant_algo {shown(algorithm)} is not read, only {', '.join(ALGORITHMS)}")

    def decoded(self, tensors: Mapping[str, TensorInfo]) -> dict[str, DecodedTensor]:
        found: dict[str, DecodedTensor] = {}
        for name, info in tensors.items():
            if not name.endswith(WEIGHT) or info.dtype not in ("F8_E4M3", "U8"):
                continue
            stem = name.removesuffix(WEIGHT)
            unused = [tensors[stem + end] for end in UNUSED if stem + end in tensors]
            check_matrix(info)
            if info.dtype == "U8":
                scale, second = (part(tensors, stem + end, info, kinds) for end, kinds in ((SCALE, ("F8_E4M3",)), (SECOND, ("F32",))))
                found[name] = TwoScales(name, info, scale, second, False, unused)
            else:
                scale = part(tensors, stem + SCALE, info, ("F32",), (), (1,))
                found[name] = BlockScaled(name, info, check_finite(scale), (info.shape[0], info.shape[1]), unused)
        return found
