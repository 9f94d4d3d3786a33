"""compressed-tensors: what its ModelCompressor packs, against what it unpacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.encodings.libraries.checks import check_kept, check_values, tiny_model
from tests.checkpoint.encodings.test_keep import cache  # noqa: F401

NVFP4 = 5 * 2.0**-24
"""Of a value: the library divides scales by the second one; we, as its kernels and the written model do, multiply by its reciprocal.
That and its product are rounded, and so are the quotient and the products with codes."""


def scheme(bits: int, strategy: str, kind: str = "int", symmetric: bool = True, **sizes: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "symmetric": symmetric, "strategy": strategy, **sizes}
    return {"targets": ["Linear"], "weights": weights}


KINDS: dict[str, tuple[str, Any]] = {
    "int4 groups": ("pack-quantized", scheme(4, "group", group_size=32)),
    "int4 groups with zero points": ("pack-quantized", scheme(4, "group", symmetric=False, group_size=32)),
    "int4 channels with zero points": ("pack-quantized", scheme(4, "channel", symmetric=False)),
    "int3 channels": ("pack-quantized", scheme(3, "channel")),
    "int2 groups": ("pack-quantized", scheme(2, "group", group_size=16)),
    "int8 channels": ("pack-quantized", scheme(8, "channel")),
    "int8 and inputs": ("int-quantized", "W8A8"),
    "FP8 channels": ("float-quantized", "FP8_DYNAMIC"),
    "FP8": ("float-quantized", "FP8"),
    "FP8 alone": ("naive-quantized", scheme(8, "channel", "float")),
    "FP8 blocks": ("naive-quantized", scheme(8, "block", "float", block_structure=[32, 32])),
    "NVFP4": ("nvfp4-pack-quantized", "NVFP4A16"),
    "MXFP4": ("mxfp4-pack-quantized", "MXFP4A16"),
    "MXFP8": ("mxfp8-quantized", "MXFP8A16"),
}


def compressed(folder: Path, told: Any, tmp_path: Path) -> Any:
    """The compressor, and the model that it has compressed and saved in `folder`."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    model = tiny_model(tmp_path / "source")
    groups = {told: ["Linear"]} if isinstance(told, str) else {"group_0": told}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]), show_progress=False)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            args = module.quantization_scheme.weights
            parts = grouped(module.weight.data, args.strategy, args.group_size, args.block_structure)
            second = None
            if hasattr(module, "weight_global_scale"):
                second = generate_gparam(parts.min(), parts.max())
                module.weight_global_scale.data.copy_(second)
            scale, zeros = calculate_qparams(parts.amin(-1), parts.amax(-1), args, second)
            module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data.copy_(zeros.reshape(module.weight_zero_point.shape))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    return compressor, model


def grouped(weight: Any, strategy: str, size: int | None, block: list[int] | None) -> Any:
    """The weight with what shares a scale along the last axis."""
    if strategy == "block" and block:
        return weight.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0])).transpose(1, 2).flatten(2)
    return {"tensor": weight.reshape(1, -1), "channel": weight}[strategy] if size is None else weight.unflatten(-1, (-1, size))


def theirs(compressor: Any, model: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(values, codes) of the quantized weights, by the library."""
    import torch
    from compressed_tensors.compressors.mx_utils import decompress_mx_scale
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    values, codes = {}, {}
    for name, module in model.named_modules():
        if not hasattr(module, "weight_scale"):
            continue
        args, packed = module.quantization_scheme.weights, getattr(module, "weight_packed", None)
        if packed is None:
            codes[name] = module.weight.data.view(torch.uint8 if args.type == "float" else torch.int8)
        elif args.type == "float":
            codes[name] = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
            # Its decompression unpacks to bfloat16, and all that follows is rounded to that; here the same steps in float32.
            unpacked = unpack_fp4_from_uint8(packed, *codes[name].shape, dtype=torch.float32)
            if "weight_global_scale" in module._parameters:
                values[name] = dequantize(unpacked, module.weight_scale.float(), None, args, torch.float32, module.weight_global_scale)
            else:
                values[name] = dequantize(unpacked, decompress_mx_scale(module.weight_scale).float(), None, args, torch.float32)
        else:
            codes[name] = unpack_from_int32(packed, args.num_bits, module.weight_shape)
    compressor.decompress_model(model)
    found = {name: values.get(name, model.get_submodule(name).weight.data) for name in codes}
    # Of MXFP8 it decompresses to bfloat16, which holds four significant bits and a power of two exactly.
    found = {name: one.float() for name, one in found.items()}
    return ({f"{name}.weight": one.numpy() for name, one in part.items()} for part in (found, codes))


@pytest.mark.parametrize("kind", KINDS)
def test_values(tmp_path: Path, kind: str) -> None:
    form, told = KINDS[kind]
    compressor, model = compressed(tmp_path / "m", told, tmp_path)
    assert compressor.quantization_config.format == form
    values, _ = theirs(compressor, model)
    assert len(values) == 14
    check_values(tmp_path / "m", values, NVFP4 if kind == "NVFP4" else 0.0)


@pytest.mark.parametrize(
    ("kind", "offset"),
    # Of u4 codes, and of those of OpenVINO's i4 and i8, which are signed.
    [
        ("int4 groups", 0),
        ("int4 groups with zero points", 8),
        ("int8 channels", 0),
        ("FP8 channels", 0),
        ("NVFP4", 0),
        ("MXFP4", 0),
        ("MXFP8", 0),
    ],
)
def test_keep(tmp_path: Path, kind: str, offset: int) -> None:
    values, codes = theirs(*compressed(tmp_path / "m", KINDS[kind][1], tmp_path))
    moved = {name: one + np.int8(offset) if offset else one for name, one in codes.items()}
    check_kept(tmp_path / "m", values, moved, tmp_path, NVFP4 if kind == "NVFP4" else 0.0)
