"""compressed-tensors: each format and strategy by the book, read back to the value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from llmcomp import checkpoint
from tests.checkpoint.encodings.store import bf16, check_decoded, refused, stored

X = "model.layers.0.mlp.down_proj"


def settings(*schemes: dict[str, Any], form: str = "pack-quantized", **more: Any) -> dict[str, Any]:
    groups = {f"group_{i}": {"targets": ["Linear"], "weights": scheme, "input_activations": None} for i, scheme in enumerate(schemes)}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"], **more}


def scheme(bits: int = 4, strategy: str = "group", size: int | None = 32, symmetric: bool = True, kind: str = "int", **more: Any) -> Any:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "group_size": size, "symmetric": symmetric, **more}


def across(codes: np.ndarray, bits: int) -> np.ndarray:
    """Signed codes (n, m) -> words (n, ceil(m · bits / 32)): bit b of code c, made unsigned, is bit c · bits + b of its row."""
    n, m = codes.shape
    words = np.zeros((n, -(-m * bits // 32)), np.uint32)
    for r in range(n):
        for c in range(m):
            for b in range(bits):
                at = c * bits + b
                words[r, at // 32] |= np.uint32((int(codes[r, c]) + (1 << bits - 1) >> b & 1) << at % 32)
    return words.view(np.int32)


def made(
    bits: int, out: int, width: int, group: int, symmetric: bool, order: np.ndarray | None = None, kind: Any = np.float16
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(width + bits)
    low, high = -(1 << bits - 1), 1 << bits - 1
    order = np.arange(width) // group if order is None else order
    groups = width // group
    codes = rng.integers(low, high, (out, width))
    zeros = np.zeros((out, groups), int) if symmetric else rng.integers(low, high, (out, groups))
    scales = rng.uniform(1e-3, 2e-2, (out, groups)).astype(kind)
    weight = np.empty((out, width), np.float32)
    for o in range(out):
        for i in range(width):
            weight[o, i] = np.float32(int(codes[o, i]) - int(zeros[o, order[i]])) * np.float32(scales[o, order[i]])
    parts = {
        f"{X}.weight_packed": across(codes, bits),
        f"{X}.weight_scale": scales,
        f"{X}.weight_shape": np.array([out, width], np.int64),
    }
    if not symmetric:
        parts[f"{X}.weight_zero_point"] = np.ascontiguousarray(across(zeros.T, bits).T)
    return parts, weight


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_packed_groups(tmp_path: Path, bits: int, symmetric: bool) -> None:
    parts, weight = made(bits, 20, 96, 32, symmetric)
    folder = stored(tmp_path, settings(scheme(bits, symmetric=symmetric)), parts)
    check_decoded(checkpoint.open(folder), {f"{X}.weight": weight})


@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_channels_that_fill_no_whole_words(tmp_path: Path, symmetric: bool) -> None:
    parts, weight = made(4, 21, 100, 100, symmetric, kind=bf16(0).dtype)
    folder = stored(tmp_path, settings(scheme(4, "channel", None, symmetric)), parts)
    check_decoded(checkpoint.open(folder), {f"{X}.weight": weight})


def test_zero_points_that_are_not_packed(tmp_path: Path) -> None:
    """As versions before 0.9 wrote them."""
    parts, weight = made(4, 16, 64, 32, False)
    nibbles = parts[f"{X}.weight_zero_point"].view(np.uint32)
    parts[f"{X}.weight_zero_point"] = np.array(
        [[(int(nibbles[o // 8, g]) >> o % 8 * 4 & 15) - 8 for g in range(2)] for o in range(16)], np.int8
    )
    check_decoded(checkpoint.open(stored(tmp_path, settings(scheme(symmetric=False)), parts)), {f"{X}.weight": weight})


def test_order_of_activations(tmp_path: Path) -> None:
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(3), 32))
    parts, weight = made(4, 16, 96, 32, False, order)
    parts[f"{X}.weight_g_idx"] = order.astype(np.int32)
    told = settings(scheme(symmetric=False, actorder="group"))
    check_decoded(checkpoint.open(stored(tmp_path / "group", told, parts)), {f"{X}.weight": weight})
    parts, weight = made(4, 16, 96, 32, False)
    parts[f"{X}.weight_g_idx"] = np.full(96, -1, np.int32)
    check_decoded(checkpoint.open(stored(tmp_path / "none", told, parts)), {f"{X}.weight": weight})


def test_several_config_groups(tmp_path: Path) -> None:
    first, one = made(4, 16, 96, 32, True)
    second, two = made(8, 16, 96, 96, True)
    parts = first | {name.replace("down", "up"): values for name, values in second.items()}
    folder = stored(tmp_path, settings(scheme(), scheme(8, "channel", None), form="mixed-precision"), parts)
    check_decoded(checkpoint.open(folder), {f"{X}.weight": one, f"{X.replace('down', 'up')}.weight": two})


@pytest.mark.parametrize("strategy", ["channel", "tensor", "group"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_bytes(tmp_path: Path, strategy: str, symmetric: bool) -> None:
    rng = np.random.default_rng(0)
    shape = {"channel": (20, 1), "tensor": (1,), "group": (20, 3)}[strategy]
    codes, zeros = rng.integers(-128, 128, (20, 96)).astype(np.int8), rng.integers(-128, 128, shape).astype(np.int8)
    scales = rng.uniform(1e-3, 2e-2, shape).astype(np.float16)
    weight = np.empty((20, 96), np.float32)
    for o in range(20):
        for i in range(96):
            at = {"channel": (o, 0), "tensor": (0,), "group": (o, i // 32)}[strategy]
            weight[o, i] = np.float32(int(codes[o, i]) - (0 if symmetric else int(zeros[at]))) * np.float32(scales[at])
    parts = {f"{X}.weight": codes, f"{X}.weight_scale": scales, f"{X}.input_scale": np.ones(1, np.float32)}
    if not symmetric:
        parts[f"{X}.weight_zero_point"] = zeros
    told = scheme(8, strategy, 32 if strategy == "group" else None, symmetric)
    for i, form in enumerate(("int-quantized", "naive-quantized")):
        check_decoded(checkpoint.open(stored(tmp_path / str(i), settings(told, form=form), parts)), {f"{X}.weight": weight})


@pytest.mark.parametrize("strategy", ["channel", "tensor", "group", "block"])
def test_fp8(tmp_path: Path, strategy: str) -> None:
    rng = np.random.default_rng(0)
    shape = {"channel": (20, 1), "tensor": (1,), "group": (20, 3), "block": (2, 6)}[strategy]
    codes = rng.normal(size=(20, 96)).astype(ml_dtypes.float8_e4m3fn)
    scales = bf16(rng.uniform(1e-3, 2e-2, shape))
    weight = np.empty((20, 96), np.float32)
    for o in range(20):
        for i in range(96):
            at = {"channel": (o, 0), "tensor": (0,), "group": (o, i // 32), "block": (o // 16, i // 16)}[strategy]
            # Four significant bits times eight: exact.
            weight[o, i] = np.float32(codes[o, i]) * np.float32(scales[at])
    parts = {f"{X}.weight": codes, f"{X}.weight_scale": scales, f"{X}.input_scale": np.ones(1, np.float32)}
    told = scheme(8, strategy, 32 if strategy == "group" else None, kind="float", block_structure=[16, 16])
    folder = stored(tmp_path, settings(told, form="float-quantized"), parts)
    check_decoded(checkpoint.open(folder), {f"{X}.weight": weight})


GOOD = made(4, 16, 96, 32, False)[0]
GROUPS = {"group_0": {"targets": ["Linear"], "weights": scheme(symmetric=False)}}
WORD = r"\[16, 12\] for \[16, 96\], scales \[16, 3\], zero points: none of the config_groups stores a weight so"


def only(**weights: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {**scheme(symmetric=False), **weights}}}}


DAMAGE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "Marlin": ({"format": "marlin-24"}, {}, "format 'marlin-24' is not read"),
    "another format of a group": ({"config_groups": {"a": {**GROUPS["group_0"], "format": "mxfp6-pack-quantized"}}}, {}, "mxfp6-pack"),
    "sparse": ({"sparsity_config": {"format": "sparse-24-bitmask"}}, {}, "sparse weights"),
    "rotated": ({"transform_config": {"config_groups": {"u": {}}}}, {}, "transform_config is not read"),
    "a preset": ({"config_groups": {"W4A16": ["Linear"]}}, {}, "does not say how"),
    "no groups": ({"config_groups": None}, {}, "none of the config_groups"),
    "nine bits": (only(num_bits=9), {}, "num_bits 9"),
    "bits of a lie": (only(num_bits="4"), {}, "num_bits '4'"),
    "four bits of float": (only(type="float", group_size=64), {}, "type 'float' with num_bits 4"),
    "tokens": (only(strategy="token"), {}, "strategy 'token' is not read"),
    "no group size": (only(group_size=None), {}, "group_size None"),
    "no block": (only(strategy="block", block_structure=[16]), {}, r"block_structure \[16\]"),
    "groups that do not divide": (only(group_size=36), {}, WORD),
    "groups of another size": (only(group_size=48), {}, WORD),
    "other bits": (only(num_bits=8), {}, WORD),
    "no zero points": ({}, {f"{X}.weight_zero_point": None}, "no zero points: none of"),
    "zero points of another shape": ({}, {f"{X}.weight_zero_point": np.ones((3, 3), np.int32)}, r"its shape is \[3, 3\].*\[2, 3\]"),
    "zero points of floats": ({}, {f"{X}.weight_zero_point": np.ones((16, 3), np.float32)}, "it is F32"),
    "no scale": ({}, {f"{X}.weight_scale": None}, "weight_scale, which it is decoded with"),
    "no shape": ({}, {f"{X}.weight_shape": None}, "weight_shape, which it is decoded with"),
    "no codes": ({}, {f"{X}.weight_packed": None, **{f"y.{k.rsplit('.', 1)[1]}": v for k, v in GOOD.items()}}, "other parts"),
    "another shape": ({}, {f"{X}.weight_shape": np.array([96, 16])}, r"it says \[96, 16\]"),
    "shape of a lie": ({}, {f"{X}.weight_shape": np.array([16, -96])}, r"it says \[16, -96\]"),
    "shape of nothing": ({}, {f"{X}.weight_shape": np.array([16, 1 << 40])}, "it says"),
    "NaN": ({}, {f"{X}.weight_scale": np.full((16, 3), np.nan, np.float16)}, "scale 0 is NaN"),
    "order beyond": ({}, {f"{X}.weight_g_idx": np.full(96, 3, np.int32)}, "group 3 of 3"),
    "order of another width": ({}, {f"{X}.weight_g_idx": np.zeros(95, np.int32)}, r"its shape is \[95\]"),
    "codes of bytes": ({}, {f"{X}.weight_packed": np.ones((16, 48), np.uint8)}, "it is U8"),
    "a stack": ({}, {f"{X}.weight_packed": np.ones((2, 16, 12), np.int32)}, "is no matrix"),
    "twice": ({}, {f"{X}.weight": np.ones((16, 96), np.float32)}, "stored once more"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage(tmp_path: Path, damage: str) -> None:
    changed, tensors, words = DAMAGE[damage]
    kept = {name: values for name, values in {**GOOD, **tensors}.items() if values is not None}
    refused(stored(tmp_path, settings(scheme(symmetric=False)) | changed, kept), words)


@pytest.mark.parametrize("bits", [4, 8])
def test_powers_of_two(tmp_path: Path, bits: int) -> None:
    rng = np.random.default_rng(0)
    parts, weight = powers(rng, bits)
    told = scheme(bits, "group", 32, kind="float")
    form = "mxfp4-pack-quantized" if bits == 4 else "mxfp8-quantized"
    check_decoded(checkpoint.open(stored(tmp_path / "m", settings(told, form=form), parts)), {f"{X}.weight": weight})
    codes = f"{X}.weight_packed" if bits == 4 else f"{X}.weight"
    damages: tuple[tuple[dict[str, Any], str], ...] = (
        ({f"{X}.weight_scale": np.full((20, 3), 255, np.uint8)}, "scale 0 is NaN"),
        ({f"{X}.weight_scale": np.full((20, 4), 127, np.uint8)}, r"its shape is \[20, 4\].*\[20, 3\]"),
        ({codes: parts[codes][:, :-8]}, "groups of 32 do not divide"),
    )
    for number, (changed, words) in enumerate(damages):
        refused(stored(tmp_path / str(number), settings(told, form=form), {**parts, **changed}), words)
    other = scheme(bits, "group", 16, kind="float") if bits == 8 else scheme(4, "tensor_group", 16, kind="float")
    refused(stored(tmp_path / "other", settings(other, form=form), parts), "none of the config_groups")


def powers(rng: np.random.Generator, bits: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """(parts, weight) of 20 x 96 by the book (OCP MX 1.0, 5.3): exponents of all sizes but those that leave float32."""
    exponents = rng.integers(20, 230, (20, 3)).astype(np.uint8)
    codes = rng.integers(0, 16, (20, 96)) if bits == 4 else rng.normal(size=(20, 96)).astype(ml_dtypes.float8_e4m3fn)
    levels = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    weight = np.empty((20, 96), np.float32)
    for o in range(20):
        for i in range(96):
            value = float(codes[o, i]) if bits == 8 else levels[codes[o, i] & 7] * (-1 if codes[o, i] & 8 else 1)
            weight[o, i] = value * 2.0 ** (int(exponents[o, i // 32]) - 127)
    scales = {f"{X}.weight_scale": exponents}
    if bits == 8:
        return {f"{X}.weight": codes, **scales}, weight
    return {f"{X}.weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8), **scales}, weight
