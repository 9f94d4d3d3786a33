"""TensorRT Model Optimizer: what it exports of a tiny model, against what its tensors dequantize to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint.encodings.libraries.checks import check_kept, check_values, tiny_model
from tests.checkpoint.encodings.test_export import IDS
from tests.checkpoint.encodings.test_keep import cache  # noqa: F401

KINDS = {"fp8": ("FP8_DEFAULT_CFG", 14), "nvfp4": ("NVFP4_DEFAULT_CFG", 14), "nvfp4 of some": ("NVFP4_MLP_ONLY_CFG", 6)}
"""Its recipe, and how many layers that quantizes."""


def exported(folder: Path, kind: str, tmp_path: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(values, codes) of the quantized weights that are in `folder`, by the library."""
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor
    from safetensors.torch import load_file

    model = tiny_model(tmp_path / "source")
    mtq.quantize(model, getattr(mtq, KINDS[kind][0]), lambda model: model(torch.from_numpy(IDS)))
    export_hf_checkpoint(model, export_dir=str(folder))
    tensors = load_file(folder / "model.safetensors")
    values, codes = {}, {}
    for name in (name.removesuffix("_scale") for name in tensors if name.endswith(".weight_scale")):
        stored, scale = tensors[name], tensors[f"{name}_scale"]
        if stored.dtype == torch.uint8:
            shape = torch.Size((stored.shape[0], stored.shape[1] * 2))
            packed = NVFP4QTensor(shape, torch.float32, stored)
            value = packed.dequantize(torch.float32, scale=scale, double_scale=tensors[f"{name}_scale_2"], block_sizes={-1: 16})
            code = torch.stack([stored & 15, stored >> 4], -1).reshape(shape)
        else:
            value = FP8QTensor(stored.shape, torch.float32, stored).dequantize(torch.float32, scale=scale)
            code = stored.view(torch.uint8)
        values[name], codes[name] = value.numpy(), code.numpy()
    return values, codes


@pytest.mark.parametrize("kind", KINDS)
def test_values(tmp_path: Path, kind: str) -> None:
    values, _ = exported(tmp_path / "m", kind, tmp_path)
    assert len(values) == KINDS[kind][1]
    check_values(tmp_path / "m", values)


@pytest.mark.parametrize("kind", ["fp8", "nvfp4 of some"])
def test_keep(tmp_path: Path, kind: str) -> None:
    values, codes = exported(tmp_path / "m", kind, tmp_path)
    check_kept(tmp_path / "m", values, codes, tmp_path)
