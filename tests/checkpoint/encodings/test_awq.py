"""AWQ: packed by the book, read back to the value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcomp import checkpoint
from tests.checkpoint.encodings.store import check_decoded, refused, stored

X = "model.layers.0.self_attn.q_proj"
SETTINGS = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def across(codes: np.ndarray) -> np.ndarray:
    """Codes (n, m) -> words (n, m / 8): nibble k of word j is code ORDER[k] of its eight."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for n in range(words.shape[0]):
        for j in range(words.shape[1]):
            for k in range(8):
                words[n, j] |= np.uint32(int(codes[n, 8 * j + ORDER[k]]) << 4 * k)
    return words.view(np.int32)


def made(width: int, out: int, group: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(width)
    size = width if group == -1 else group
    codes, zeros = rng.integers(0, 16, (width, out)), rng.integers(0, 16, (width // size, out))
    scales = rng.uniform(1e-3, 2e-2, zeros.shape).astype(np.float16)
    weight = np.empty((out, width), np.float32)
    for o in range(out):
        for i in range(width):
            weight[o, i] = np.float32(int(codes[i, o]) - int(zeros[i // size, o])) * np.float32(scales[i // size, o])
    return {f"{X}.qweight": across(codes), f"{X}.qzeros": across(zeros), f"{X}.scales": scales}, weight


@pytest.mark.parametrize("group", [32, -1])
def test_groups(tmp_path: Path, group: int) -> None:
    parts, weight = made(96, 40, group)
    check_decoded(checkpoint.open(stored(tmp_path, {**SETTINGS, "group_size": group}, parts)), {f"{X}.weight": weight})


def test_names_of_settings(tmp_path: Path) -> None:
    parts, weight = made(64, 16, 32)
    old = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM"}
    check_decoded(checkpoint.open(stored(tmp_path, old, parts)), {f"{X}.weight": weight})


GOOD = made(64, 16, 32)[0]
DAMAGE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "three bits": ({"bits": 3}, {}, "bits 3 is not read, only 4"),
    "gemv": ({"version": "gemv"}, {}, "version 'gemv' .* is not read"),
    "another library": ({"backend": "llm-awq"}, {}, "backend 'llm-awq' is not read"),
    "version of a lie": ({"version": 3}, {}, "version 3"),
    "groups that do not divide": ({"group_size": 24}, {}, "groups of 24 do not divide its 64 inputs"),
    "groups of another size": ({"group_size": 16}, {}, r"its shape is \[2, 2\].*\[4, 2\]"),
    "no size": ({"group_size": "128"}, {}, "is no size"),
    "no scales": ({}, {f"{X}.scales": None}, "scales, which it is decoded with"),
    "no zeros": ({}, {f"{X}.qzeros": None}, "qzeros, which it is decoded with"),
    "no codes": ({}, {f"{X}.qweight": None, **{f"y.{k.rsplit('.', 1)[1]}": v for k, v in GOOD.items()}}, "other parts"),
    "codes of eight bits": ({}, {f"{X}.qweight": np.ones((64, 2), np.int8)}, "it is I8"),
    "scales of another shape": ({}, {f"{X}.scales": np.ones((2, 15), np.float16)}, r"\[2, 15\]"),
    "infinity": ({}, {f"{X}.scales": np.full((2, 16), np.inf, np.float16)}, "scale 0 is NaN or infinite"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage(tmp_path: Path, damage: str) -> None:
    settings, tensors, words = DAMAGE[damage]
    kept = {name: values for name, values in {**GOOD, **tensors}.items() if values is not None}
    refused(stored(tmp_path, {**SETTINGS, **settings}, kept), words)
