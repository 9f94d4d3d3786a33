"""transformers' own operations: FP8 in blocks, packed and unpacked, and the unpacking of gpt-oss's MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.encodings.libraries.checks import check_kept, check_values, tiny_model
from tests.checkpoint.encodings.store import stored
from tests.checkpoint.encodings.test_keep import cache  # noqa: F401


def fp8(folder: Path, block: tuple[int, int] | None, tmp_path: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(values, codes) of the weights of a tiny llama, which is in `folder` as its FP8 quantizer packs them."""
    import torch
    from safetensors.torch import save_file
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
    from transformers.quantizers.auto import AutoHfQuantizer

    told = FineGrainedFP8Config(weight_block_size=block)
    quantizer = AutoHfQuantizer.from_config(told)
    model = tiny_model(tmp_path / "source")
    folder.mkdir()
    tensors: dict[str, Any] = {}
    values, codes = {}, {}
    for name, weight in model.state_dict().items():
        if not name.endswith("_proj.weight"):
            tensors |= {name: weight} if name != "lm_head.weight" else {}
            continue
        parts = Fp8Quantize(quantizer).convert({name: [weight]})
        tensors |= parts
        codes[name] = parts[name].view(torch.uint8).numpy()
        pair = {"weight$": [parts[name]], "weight_scale_inv": [parts[f"{name}_scale_inv"]]}
        values[name] = Fp8Dequantize(quantizer).convert(pair, full_layer_name=name)[name].numpy()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": told.to_dict()}))
    return values, codes


@pytest.mark.parametrize("block", [(32, 32), (16, 8), None])
def test_fp8(tmp_path: Path, block: tuple[int, int] | None) -> None:
    values, _ = fp8(tmp_path / "m", block, tmp_path)
    check_values(tmp_path / "m", values)


@pytest.mark.longest
def test_fp8_is_kept(tmp_path: Path) -> None:
    values, codes = fp8(tmp_path / "m", (32, 32), tmp_path)
    check_kept(tmp_path / "m", values, codes, tmp_path)


def test_mxfp4(tmp_path: Path) -> None:
    """It packs with kernels for GPUs alone; it unpacks every code under exponents of normal numbers."""
    import torch
    from transformers import Mxfp4Config
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 40, 2, 16)).astype(np.uint8)
    scales = rng.integers(110, 130, (3, 40, 2)).astype(np.uint8)
    name = "model.layers.0.mlp.experts.down_proj"
    parts = {f"{name}_blocks": blocks, f"{name}_scales": scales}
    folder = stored(tmp_path / "m", Mxfp4Config().to_dict(), parts)
    # In their bfloat16 as well it would be exact: a code has two significant bits.
    theirs = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32)
    opened = check_values(folder, {name: theirs.numpy()})
    encoded = opened.encoded(name)
    assert encoded is not None
    (form,) = encoded.held.forms
    for expert in range(3):
        lines = encoded.lines(form, expert, 0, 40)
        np.testing.assert_array_equal(lines.codes, np.stack([blocks[expert] & 15, blocks[expert] >> 4], -1).reshape(40, 64))
        np.testing.assert_array_equal(lines.scale, np.ldexp(np.float32(1), scales[expert].astype(int) - 127))
