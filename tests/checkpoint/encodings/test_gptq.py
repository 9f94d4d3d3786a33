"""GPTQ: packed by the book, read back to the value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcomp import checkpoint
from tests.checkpoint.encodings.store import bf16, check_decoded, refused, stored

X = "model.layers.0.mlp.up_proj"


def settings(bits: int = 4, group: int = 32, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True, **more}


def down(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes (n, m) -> words (n · bits / 32, m): bit b of code r is bit r · bits + b of its column."""
    words = np.zeros((codes.shape[0] * bits // 32, codes.shape[1]), np.uint32)
    for r in range(codes.shape[0]):
        for m in range(codes.shape[1]):
            for b in range(bits):
                at = r * bits + b
                words[at // 32, m] |= np.uint32((int(codes[r, m]) >> b & 1) << at % 32)
    return words.view(np.int32)


def made(
    bits: int, width: int, out: int, group: int, less: int = 1, order: np.ndarray | None = None, sym: bool = False, scale: Any = np.float16
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Parts of random codes, and the weight that they are."""
    rng = np.random.default_rng(width + bits)
    size = width if group == -1 else group
    groups = -(-width // size)
    order = np.arange(width) // size if order is None else order
    codes = rng.integers(0, 1 << bits, (width, out))
    zeros = np.full((groups, out), 1 << (bits - 1)) if sym else rng.integers(0, 1 << bits, (groups, out))
    scales = rng.uniform(1e-3, 2e-2, (groups, out)).astype(scale)
    weight = np.empty((out, width), np.float32)
    for o in range(out):
        for i in range(width):
            weight[o, i] = np.float32(int(codes[i, o]) - int(zeros[order[i], o])) * np.float32(scales[order[i], o])
    kept = (zeros - less) % (1 << bits)
    parts = {
        f"{X}.qweight": down(codes, bits),
        f"{X}.qzeros": np.ascontiguousarray(down(kept.T, bits).T),
        f"{X}.scales": scales,
        f"{X}.g_idx": order.astype(np.int32),
    }
    return parts, weight


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [32, -1])
def test_bits_and_groups(tmp_path: Path, bits: int, group: int) -> None:
    parts, weight = made(bits, 96, 64, group)
    check_decoded(checkpoint.open(stored(tmp_path, settings(bits, group), parts)), {f"{X}.weight": weight})


def test_symmetric_and_version_two(tmp_path: Path) -> None:
    parts, weight = made(4, 64, 32, 32, sym=True)
    assert (parts[f"{X}.qzeros"].view(np.uint32) == 0x77777777).all()
    check_decoded(checkpoint.open(stored(tmp_path / "sym", settings(), parts)), {f"{X}.weight": weight})
    parts, weight = made(4, 64, 32, 32, less=0)
    v2 = stored(tmp_path / "v2", settings(checkpoint_format="gptq_v2"), parts)
    check_decoded(checkpoint.open(v2), {f"{X}.weight": weight})


def test_order_of_activations(tmp_path: Path) -> None:
    order = np.random.default_rng(3).permutation(np.repeat(np.arange(3), 32))
    parts, weight = made(4, 96, 32, 32, order=order)
    check_decoded(checkpoint.open(stored(tmp_path, settings(desc_act=True), parts)), {f"{X}.weight": weight})


def test_a_last_group_that_is_cut_and_no_order(tmp_path: Path) -> None:
    parts, weight = made(4, 80, 32, 32, scale=bf16(0).dtype)
    del parts[f"{X}.g_idx"]
    check_decoded(checkpoint.open(stored(tmp_path, settings(), parts)), {f"{X}.weight": weight})


def test_layers_of_different_bits(tmp_path: Path) -> None:
    parts, weight = made(8, 64, 32, 32)
    other, second = made(4, 64, 32, 64)
    parts |= {name.replace("up_proj", "down_proj"): values for name, values in other.items()}
    folder = stored(tmp_path, settings(dynamic={r"+:.*up_proj": {"bits": 8}, r".*down_proj": {"group_size": 64}}), parts)
    check_decoded(checkpoint.open(folder), {f"{X}.weight": weight, f"{X.replace('up_proj', 'down_proj')}.weight": second})


GOOD = made(4, 64, 32, 32)[0]
BAD_SCALES = GOOD[f"{X}.scales"].copy()
BAD_SCALES[1, 3] = np.nan
ORDER = GOOD[f"{X}.g_idx"]
DAMAGE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no bits": ({"bits": None}, {}, "bits None is not read"),
    "five bits": ({"bits": 5}, {}, "bits 5 is not read, only 2, 3, 4, 8"),
    "bits of a lie": ({"bits": True}, {}, "bits True"),
    "bits that the order denies": ({"bits": 8}, {}, "its 8 rows of 32 bits are no 64 inputs of 8 bits"),
    "group size": ({"group_size": 0}, {}, "group_size 0 is no size"),
    "Marlin": ({"checkpoint_format": "marlin"}, {}, "checkpoint_format 'marlin' is not read"),
    "old Marlin": ({"is_marlin_format": True}, {}, "Marlin"),
    "groups that the size denies": ({"group_size": 16}, {f"{X}.g_idx": None}, "it has 2 groups, and 64 inputs in groups of 16 are 4"),
    "no order": ({"desc_act": True}, {f"{X}.g_idx": None}, "g_idx, which says the order"),
    "no scales": ({}, {f"{X}.scales": None}, f"{X}.scales, which it is decoded with"),
    "no zeros": ({}, {f"{X}.qzeros": None}, f"{X}.qzeros, which it is decoded with"),
    "no codes": ({}, {f"{X}.qweight": None, **{f"y.{k.rsplit('.', 1)[1]}": v for k, v in GOOD.items()}}, "other parts"),
    "twice": ({}, {f"{X}.weight": np.ones((32, 64), np.float32)}, "stored once more"),
    "NaN": ({}, {f"{X}.scales": BAD_SCALES}, "scale 35 is NaN"),
    "order beyond": ({}, {f"{X}.g_idx": ORDER + 1}, "column 32 is said to be in group 2 of 2"),
    "order before": ({}, {f"{X}.g_idx": ORDER - 1}, "column 0 is said to be in group -1"),
    "order of another width": ({}, {f"{X}.g_idx": ORDER[:-1]}, "no 63 inputs"),
    "order of no width": ({}, {f"{X}.g_idx": ORDER.reshape(2, 32)}, "no 0 inputs"),
    "order of no numbers": ({}, {f"{X}.g_idx": ORDER.astype(np.float32)}, "it is F32"),
    "codes of floats": ({}, {f"{X}.qweight": np.ones((8, 32), np.float32)}, "it is F32"),
    "codes in a vector": ({}, {f"{X}.qweight": np.ones(8, np.int32)}, "is no matrix"),
    "nothing": ({}, {f"{X}.qweight": np.ones((0, 32), np.int32)}, "is no matrix"),
    "zeros of another shape": ({}, {f"{X}.qzeros": np.ones((2, 5), np.int32)}, r"its shape is \[2, 5\].*\[2, 4\]"),
    "scales of another shape": ({}, {f"{X}.scales": np.ones((2, 31), np.float16)}, r"its shape is \[2, 31\].*\[2, 32\]"),
    "scales of no groups": ({}, {f"{X}.scales": np.ones((0, 32), np.float16)}, "is no matrix"),
    "zeros that fill no word": ({}, {n: v[:, :9] for n, v in GOOD.items() if v.ndim == 2}, "fill no whole words"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage(tmp_path: Path, damage: str) -> None:
    changed, tensors, words = DAMAGE[damage]
    kept = {name: values for name, values in {**GOOD, **tensors}.items() if values is not None}
    refused(stored(tmp_path, settings(**changed) if "bits" not in changed else {**settings(), **changed}, kept), words)
