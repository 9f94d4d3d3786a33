"""MXFP4 stacks: each nibble by the table of the standard, turned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcomp import checkpoint
from tests.checkpoint.encodings.store import check_decoded, refused, stored

X = "model.layers.0.mlp.experts.gate_up_proj"
SETTINGS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def made(experts: int, out: int, groups: int, exponents: tuple[int, int] = (100, 130)) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (experts, out, groups, 16)).astype(np.uint8)
    scales = rng.integers(*exponents, (experts, out, groups)).astype(np.uint8)
    # 2^-125 and on: of smaller ones halves are subnormal in float32, which a thread that the runtime has used takes for zeros.
    scales[0, 0, 0], scales[0, 1, 0] = 2, 3
    weight = np.empty((experts, groups * 32, out), np.float32)
    for e in range(experts):
        for o in range(out):
            for i in range(groups * 32):
                byte = int(blocks[e, o, i // 32, i % 32 // 2])
                nibble = byte & 15 if i % 2 == 0 else byte >> 4
                value = E2M1[nibble & 7] * (-1 if nibble & 8 else 1)
                weight[e, i, o] = np.float32(value * 2.0 ** (int(scales[e, o, i // 32]) - 127))
    return {f"{X}_blocks": blocks, f"{X}_scales": scales}, weight


def test_a_stack(tmp_path: Path) -> None:
    parts, weight = made(3, 20, 3)
    bias = np.ones((3, 20), np.float32)
    opened = checkpoint.open(stored(tmp_path, SETTINGS, parts))
    check_decoded(opened, {X: weight})
    stored(tmp_path, SETTINGS, {**parts, f"{X}_bias": bias})
    assert np.array_equal(checkpoint.open(tmp_path).read(f"{X}_bias"), bias)


def test_only_the_columns_that_are_asked_for_are_in_memory(tmp_path: Path) -> None:
    """The stored rows of an expert are its columns: a tile of the turned matrix is a run of the file."""
    import tracemalloc

    parts = {f"{X}_blocks": np.zeros((2, 2048, 32, 16), np.uint8), f"{X}_scales": np.full((2, 2048, 32), 127, np.uint8)}
    opened = checkpoint.open(stored(tmp_path, SETTINGS, parts))
    tracemalloc.start()
    opened.window(X, 1, slice(None), slice(100, 116))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # 16 columns of 1024 in float32 are 64 KiB, and numpy has a few such arrays on the way; the matrix is 8 MiB.
    assert peak < 1 << 19


GOOD = made(2, 4, 1)[0]
DAMAGE: dict[str, tuple[dict[str, Any], str]] = {
    "no scales": ({f"{X}_scales": None}, f"{X}_scales, which it is decoded with"),
    "no blocks": ({f"{X}_blocks": None, **{k.replace("gate_up", "down"): v for k, v in GOOD.items()}}, "other parts are not in"),
    "nothing": ({f"{X}_blocks": None, f"{X}_scales": None}, "no tensor is stored so"),
    "scales of another shape": ({f"{X}_scales": np.ones((2, 4, 2), np.uint8)}, r"its shape is \[2, 4, 2\].*\[2, 4, 1\]"),
    "scales of floats": ({f"{X}_scales": np.ones((2, 4, 1), np.float32)}, "it is F32"),
    "blocks of another size": ({f"{X}_blocks": np.ones((2, 4, 1, 8), np.uint8)}, "blocks of 16 bytes"),
    "no stack": ({f"{X}_blocks": np.ones((4, 1, 16), np.uint8)}, "is no stack"),
    "nothing in it": ({f"{X}_blocks": np.ones((0, 4, 1, 16), np.uint8)}, "is no stack"),
    "NaN": ({f"{X}_scales": np.full((2, 4, 1), 255, np.uint8)}, "scale 0 is NaN"),
    "twice": ({X: np.ones((2, 32, 4), np.float32)}, "stored once more"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage(tmp_path: Path, damage: str) -> None:
    tensors, words = DAMAGE[damage]
    refused(stored(tmp_path, SETTINGS, {name: values for name, values in {**GOOD, **tensors}.items() if values is not None}), words)


def test_transformers_decodes_to_the_same(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    module = pytest.importorskip("transformers.integrations.mxfp4")
    parts, _ = made(3, 20, 3)
    opened = checkpoint.open(stored(tmp_path, SETTINGS, parts))
    blocks, scales = (torch.from_numpy(parts[X + end]) for end in ("_blocks", "_scales"))
    theirs = module.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    np.testing.assert_array_equal(opened.read(X), theirs.numpy())
