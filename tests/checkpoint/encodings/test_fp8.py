"""FP8 in blocks: every value is a code's times its block's scale, whatever the edges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from llmcomp import checkpoint
from tests.checkpoint.encodings.store import bf16, check_decoded, refused, stored

X = "model.layers.0.mlp.up_proj"
SETTINGS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}


def codes(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Every finite value of E4M3, subnormals and both zeros among them."""
    finite = [c for c in range(256) if c & 0x7F != 0x7F]
    return np.random.default_rng(seed).choice(np.array(finite, np.uint8), shape).view(ml_dtypes.float8_e4m3fn)


def e4m3(byte: int) -> float:
    """The value of a byte: a sign, four bits of exponent with bias 7, three of fraction, no infinities."""
    sign, exponent, fraction = (-1.0 if byte >> 7 else 1.0), byte >> 3 & 15, byte & 7
    return sign * (fraction * 2.0**-9 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))


def textbook(weight: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    found = np.empty(weight.shape, np.float32)
    raw = weight.view(np.uint8)
    for o in range(weight.shape[0]):
        for i in range(weight.shape[1]):
            found[o, i] = np.float32(e4m3(int(raw[o, i]))) * np.float32(scale[o // block[0], i // block[1]])
    return found


def scales(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(1).uniform(1e-4, 3e-3, shape).astype(np.float32)


@pytest.mark.parametrize("shape", [(256, 128), (150, 200), (64, 300), (128, 7)])
def test_blocks_and_their_edges(tmp_path: Path, shape: tuple[int, int]) -> None:
    weight, scale = codes(shape), scales((-(-shape[0] // 128), -(-shape[1] // 128)))
    stored(tmp_path, SETTINGS, {f"{X}.weight": weight, f"{X}.weight_scale_inv": scale})
    check_decoded(checkpoint.open(tmp_path), {f"{X}.weight": textbook(weight, scale, (128, 128))})


def test_other_blocks_and_scales_of_other_types(tmp_path: Path) -> None:
    weight = codes((48, 40))
    for scale in (bf16(scales((3, 5))), scales((3, 5)).astype(np.float16), np.full((3, 5), 120, np.uint8).view(ml_dtypes.float8_e8m0fnu)):
        stored(tmp_path, {**SETTINGS, "weight_block_size": [16, 8]}, {f"{X}.weight": weight, f"{X}.weight_scale_inv": scale})
        check_decoded(checkpoint.open(tmp_path), {f"{X}.weight": textbook(weight, scale.astype(np.float32), (16, 8))})


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_for_a_matrix_and_scales_of_inputs(tmp_path: Path, shape: tuple[int, ...]) -> None:
    weight, scale = codes((48, 40)), scales(shape)
    parts = {f"{X}.weight": weight, f"{X}.weight_scale_inv": scale, f"{X}.activation_scale": scales(())}
    stored(tmp_path, {**SETTINGS, "weight_block_size": None}, parts)
    check_decoded(checkpoint.open(tmp_path), {f"{X}.weight": textbook(weight, scale.reshape(1, 1), (48, 40))})


def test_a_stack_of_experts(tmp_path: Path) -> None:
    weight, scale = codes((3, 48, 40)), scales((3, 3, 5))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    stored(tmp_path, {**SETTINGS, "weight_block_size": [16, 8]}, {name: weight, f"{name}_scale_inv": scale})
    wanted = np.stack([textbook(w, s, (16, 8)) for w, s in zip(weight, scale, strict=True)])
    check_decoded(checkpoint.open(tmp_path), {name: wanted})


def test_what_is_not_quantized_stays(tmp_path: Path) -> None:
    weight, scale, head = codes((8, 8)), scales((1, 1)), bf16(np.ones((4, 8)))
    stored(tmp_path, SETTINGS, {"lm_head.weight": head, f"{X}.weight": weight, f"{X}.weight_scale_inv": scale})
    opened = checkpoint.open(tmp_path)
    assert opened.tensors["lm_head.weight"].dtype == "BF16" and np.array_equal(opened.read("lm_head.weight"), head)


def test_only_the_rows_that_are_asked_for_are_in_memory(tmp_path: Path) -> None:
    import tracemalloc

    weight = np.zeros((4096, 2048), np.uint8).view(ml_dtypes.float8_e4m3fn)
    stored(tmp_path, SETTINGS, {f"{X}.weight": weight, f"{X}.weight_scale_inv": scales((32, 16))})
    opened = checkpoint.open(tmp_path)
    tracemalloc.start()
    opened.rows(f"{X}.weight", 1000, 1016)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # 16 rows in float32 are 128 KiB; twice that for the scales spread over them, and what numpy needs on the way.
    assert peak < 1 << 20


GOOD = {f"{X}.weight": codes((150, 200)), f"{X}.weight_scale_inv": scales((2, 2))}
DAMAGE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no scale": ({}, {f"{X}.weight_scale_inv": None}, f"{X}.weight_scale_inv, which it is decoded with, is not in"),
    "no weight": ({}, {f"{X}.weight": None, "y.weight": codes((2, 2)), "y.weight_scale_inv": scales((1, 1))}, "other parts are not in"),
    "nothing": ({}, {f"{X}.weight": None, f"{X}.weight_scale_inv": None}, "no tensor is stored so"),
    "scale of a wrong shape": ({}, {f"{X}.weight_scale_inv": scales((2, 1))}, r"its shape is \[2, 1\].*needs \[2, 2\]"),
    "scale of a wrong type": ({}, {f"{X}.weight_scale_inv": np.ones((2, 2), np.int32)}, "it is I32"),
    "weight of another type": ({}, {f"{X}.weight": np.ones((150, 200), ml_dtypes.float8_e5m2)}, "it is F8_E5M2"),
    "a vector": ({}, {f"{X}.weight": codes((150,))}, "neither a matrix"),
    "nothing in it": ({}, {f"{X}.weight": codes((0, 200)), f"{X}.weight_scale_inv": scales((0, 2))}, "neither a matrix"),
    "NaN": ({}, {f"{X}.weight_scale_inv": np.array([[1, 1], [np.nan, 1]], np.float32)}, "scale 2 is NaN"),
    "infinity": ({}, {f"{X}.weight_scale_inv": np.array([[1, np.inf], [1, 1]], np.float32)}, "scale 1 is NaN or infinite"),
    "blocks of nothing": ({"weight_block_size": [0, 128]}, {}, r"config.json: quantization_config: weight_block_size \[0, 128\]"),
    "one block size": ({"weight_block_size": 128}, {}, "no pair"),
    "blocks of a lie": ({"weight_block_size": [True, "a"]}, {}, "no pair"),
    "one scale where blocks have theirs": ({"weight_block_size": None}, {}, "its shape is"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage(tmp_path: Path, damage: str) -> None:
    settings, tensors, words = DAMAGE[damage]
    kept = {name: values for name, values in {**GOOD, **tensors}.items() if values is not None}
    refused(stored(tmp_path, {**SETTINGS, **settings}, kept), words)


def test_transformers_decodes_to_the_same(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")

    class Quantizer:
        class quantization_config:
            weight_block_size = (128, 128)

    weight, scale = codes((256, 384)), scales((2, 3))
    stored(tmp_path, SETTINGS, {f"{X}.weight": weight, f"{X}.weight_scale_inv": scale})
    parts = {
        "weight$": [torch.from_numpy(weight.view(np.uint8)).view(torch.float8_e4m3fn)],
        "weight_scale_inv": [torch.from_numpy(scale)],
    }
    theirs = module.Fp8Dequantize(Quantizer()).convert(parts, full_layer_name="w")["w"]
    np.testing.assert_array_equal(checkpoint.open(tmp_path).read(f"{X}.weight"), theirs.numpy())
