"""NVFP4 as Model Optimizer and compressed-tensors store it, and FP8 with one scale for a weight or a row: nibble by nibble."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from llmcomp import checkpoint
from tests.checkpoint.encodings import test_compressed_tensors
from tests.checkpoint.encodings.store import bf16, check_decoded, refused, stored
from tests.checkpoint.encodings.test_fp8 import codes, e4m3, scales, textbook
from tests.checkpoint.encodings.test_mxfp4 import E2M1

X = "model.layers.0.mlp.up_proj"
SETTINGS = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
COMPRESSED = test_compressed_tensors.settings(
    test_compressed_tensors.scheme(4, "tensor_group", 16, kind="float"), form="nvfp4-pack-quantized"
)


def made(out: int, width: int, inverse: bool = False) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(width)
    packed, scale = rng.integers(0, 256, (out, width // 2)).astype(np.uint8), rng.integers(0, 0x7F, (out, width // 16)).astype(np.uint8)
    second = np.float32(1.7e-4)
    weight = np.empty((out, width), np.float32)
    for o in range(out):
        for i in range(width):
            nibble = int(packed[o, i // 2]) >> i % 2 * 4 & 15
            value = np.float32(E2M1[nibble & 7] * (-1 if nibble & 8 else 1))
            weight[o, i] = value * (np.float32(e4m3(int(scale[o, i // 16]))) * second)
    kept = scale.view(ml_dtypes.float8_e4m3fn)
    if inverse:
        stored_second = np.array([1], np.float32) / second
        # Its inverse must be `second` again, or the reference above is another one.
        assert np.float32(1) / stored_second[0] == second
        return {f"{X}.weight_packed": packed, f"{X}.weight_scale": kept, f"{X}.weight_global_scale": stored_second}, weight
    return {f"{X}.weight": packed, f"{X}.weight_scale": kept, f"{X}.weight_scale_2": np.array(second)}, weight


def forms(folder: Path) -> list[tuple[str, int, str]]:
    encoded = checkpoint.open(folder).encoded(f"{X}.weight")
    assert encoded is not None
    return [(form.format, form.group_size, form.scale_type) for form in encoded.held.forms]


@pytest.mark.parametrize("inverse", [False, True])
def test_nvfp4(tmp_path: Path, inverse: bool) -> None:
    parts, weight = made(20, 96, inverse)
    parts |= {f"{X}.{'input_global_scale' if inverse else 'input_scale'}": scales((1,))}
    folder = stored(tmp_path, COMPRESSED if inverse else SETTINGS, parts)
    check_decoded(checkpoint.open(folder), {f"{X}.weight": weight})
    assert forms(folder) == [("nvfp4", 16, "f32"), ("fp4", 16, "f32")]


@pytest.mark.parametrize("shape", [(), (1,)])
def test_fp8_in_a_file_beside_the_config(tmp_path: Path, shape: tuple[int, ...]) -> None:
    weight, scale = codes((48, 40)), scales(shape)
    stored(tmp_path, None, {f"{X}.weight": weight, f"{X}.weight_scale": scale, f"{X}.input_scale": scales(())})
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}))
    check_decoded(checkpoint.open(tmp_path), {f"{X}.weight": textbook(weight, scale.reshape(1, 1), (48, 40))})
    assert forms(tmp_path) == [("fp8_e4m3", -1, "f32")]
    (tmp_path / "hf_quant_config.json").write_text("{")
    refused(tmp_path, "it is not JSON")


@pytest.mark.parametrize("kind", [np.float32, bf16(0).dtype])
def test_rows_of_fbgemm(tmp_path: Path, kind: Any) -> None:
    weight, scale = codes((48, 40)), scales((48, 1)).astype(kind)
    parts = {f"{X}.weight": weight, f"{X}.weight_scale": scale, f"{X}.input_scale_ub": scales((1,))}
    folder = stored(tmp_path, {"quant_method": "fbgemm_fp8"}, parts)
    check_decoded(checkpoint.open(folder), {f"{X}.weight": textbook(weight, scale.astype(np.float32), (1, 40))})
    refused(stored(tmp_path, {"quant_method": "fbgemm_fp8"}, {**parts, f"{X}.weight_scale": scales((40, 1))}), r"its shape is \[40, 1\]")


GOOD, _ = made(20, 96)
DAMAGE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another algorithm": ({"quant_algo": "W4A8_AWQ"}, {}, "quant_algo 'W4A8_AWQ' is not read, only FP8, NVFP4"),
    "no algorithm": ({"quant_algo": None}, {}, "quant_algo None"),
    "no scales": ({}, {f"{X}.weight_scale": None}, "weight_scale, which it is decoded with"),
    "no second scale": ({}, {f"{X}.weight_scale_2": None}, "weight_scale_2, which it is decoded with"),
    "no weight": ({}, {f"{X}.weight": None, **{f"y.{k.rsplit('.', 1)[1]}": v for k, v in GOOD.items()}}, "other parts are not in"),
    "scales of another shape": ({}, {f"{X}.weight_scale": codes((20, 5))}, r"its shape is \[20, 5\].*\[20, 6\]"),
    "scales of NaN": ({}, {f"{X}.weight_scale": np.full((20, 6), np.nan, ml_dtypes.float8_e4m3fn)}, "scale 0 is NaN"),
    "second scale of nothing": ({}, {f"{X}.weight_scale_2": np.zeros((), np.float32)}, "0 is no scale of a whole weight"),
    "second scale for rows": ({}, {f"{X}.weight_scale_2": np.ones(20, np.float32)}, r"its shape is \[20\]"),
    "rows of no groups": ({}, {f"{X}.weight": np.ones((20, 44), np.uint8)}, "groups of 16 do not divide its 88 inputs"),
    "a stack": ({}, {f"{X}.weight": np.ones((2, 20, 48), np.uint8)}, "is no matrix"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage(tmp_path: Path, damage: str) -> None:
    settings, tensors, words = DAMAGE[damage]
    kept = {name: values for name, values in {**GOOD, **tensors}.items() if values is not None}
    refused(stored(tmp_path, {**SETTINGS, **settings}, kept), words)


def test_damage_of_compressed_tensors(tmp_path: Path) -> None:
    parts, _ = made(20, 96, True)
    other = test_compressed_tensors.settings(test_compressed_tensors.scheme(4, "group", 16, kind="float"), form="nvfp4-pack-quantized")
    refused(stored(tmp_path, other, parts), "weights of type 'float' with num_bits 4 by strategy 'group' in groups of 16 are not read")
    wide = test_compressed_tensors.settings(test_compressed_tensors.scheme(4, "tensor_group", 32, kind="float"))
    refused(stored(tmp_path, wide, parts), "by strategy 'tensor_group' in groups of 32 are not read")
    refused(stored(tmp_path, COMPRESSED, {k: v for k, v in parts.items() if "global" not in k}), "weight_global_scale, which it is")
