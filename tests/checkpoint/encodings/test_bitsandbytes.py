"""bitsandbytes: runs of the flattened weight by the book, and LLM.int8."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcomp import checkpoint
from tests.checkpoint.encodings.store import bf16, check_decoded, refused, stored

X = "model.layers.0.self_attn.k_proj.weight"
STATE = f"{X}.quant_state.bitsandbytes__"
FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
EIGHT = {"quant_method": "bitsandbytes", "load_in_8bit": True}
TABLE = np.sort(np.random.default_rng(5).uniform(-1, 1, 16)).astype(np.float32)


def text(**state: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(state).encode(), np.uint8)


def made(out: int, width: int, size: int, nested: bool, kind: str = "nf4") -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(width)
    flat = rng.integers(0, 16, out * width)
    count = -(-flat.size // size)
    packed = np.array([flat[i] << 4 | flat[i + 1] for i in range(0, flat.size, 2)], np.uint8).reshape(-1, 1)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": size, "dtype": "bfloat16", "shape": [out, width]}
    parts = {X: packed, f"{X}.quant_map": TABLE}
    if nested:
        runs = rng.integers(0, 256, count).astype(np.uint8)
        table = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
        second = rng.uniform(0.1, 1, -(-count // 4)).astype(np.float32)
        state |= {"nested_blocksize": 4, "nested_dtype": "float32", "nested_offset": 1.25}
        factors = np.array([table[runs[r]] * second[r // 4] + np.float32(1.25) for r in range(count)], np.float32)
        parts |= {f"{X}.absmax": runs, f"{X}.nested_absmax": second, f"{X}.nested_quant_map": table}
    else:
        factors = rng.uniform(0.1, 1, count).astype(np.float32)
        parts |= {f"{X}.absmax": factors}
    weight = np.array([TABLE[flat[i]] * factors[i // size] for i in range(flat.size)], np.float32).reshape(out, width)
    return parts | {STATE + kind: text(**state)}, weight


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(("out", "width", "size"), [(20, 128, 64), (21, 90, 64), (10, 16, 64)])
def test_runs_within_and_across_rows(tmp_path: Path, out: int, width: int, size: int, nested: bool) -> None:
    parts, weight = made(out, width, size, nested)
    check_decoded(checkpoint.open(stored(tmp_path, FOUR, parts)), {X: weight})


def test_fp4_and_bytes_that_are_stored_as_another_type(tmp_path: Path) -> None:
    parts, weight = made(20, 128, 64, True, "fp4")
    parts[X] = parts[X].reshape(-1).view(np.uint16).view(bf16(0).dtype).reshape(-1, 1)
    old = {"load_in_4bit": True}
    check_decoded(checkpoint.open(stored(tmp_path, old, parts)), {X: weight})


def eight() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    codes = rng.integers(-127, 128, (20, 64)).astype(np.int8)
    return {X: codes, X.replace("weight", "SCB"): rng.uniform(0.1, 1, 20).astype(np.float32)}


@pytest.mark.parametrize("layout", [True, False])
def test_eight_bits(tmp_path: Path, layout: bool) -> None:
    parts = eight()
    codes, scale = parts.values()
    weight = np.array([[np.float32(codes[o, i]) * (scale[o] / np.float32(127)) for i in range(64)] for o in range(20)])
    if layout:
        parts[X.replace("weight", "weight_format")] = np.zeros((), np.uint8)
    check_decoded(checkpoint.open(stored(tmp_path, EIGHT, parts)), {X: weight})


GOOD = made(20, 128, 64, True)[0]
GOOD_STATE = json.loads(GOOD[STATE + "nf4"].tobytes())


def state(**changed: Any) -> dict[str, Any]:
    return {STATE + "nf4": text(**{**GOOD_STATE, **changed})}


DAMAGE: dict[str, tuple[dict[str, Any], str]] = {
    "no state": ({STATE + "nf4": None}, "no tensor is stored so"),
    "state that is no JSON": ({STATE + "nf4": np.frombuffer(b"\xff{", np.uint8)}, "it is no JSON"),
    "state that is a list": ({STATE + "nf4": np.frombuffer(b"[1]", np.uint8)}, "no JSON object"),
    "state that is long": ({STATE + "nf4": np.zeros(20_000, np.uint8)}, "no short JSON"),
    "another type": ({STATE + "nf4": None, STATE + "int3": GOOD[STATE + "nf4"]}, "type int3 is not read, only nf4, fp4"),
    "two types": (state(quant_type="fp4"), "quant_type 'fp4' is not nf4"),
    "no shape": (state(shape=None), "shape None is no matrix"),
    "a stack": (state(shape=[2, 10, 128]), "is no matrix"),
    "shape of a lie": (state(shape=[20, -128]), "is no matrix"),
    "another shape": (state(shape=[21, 128]), r"its 1280 bytes are no \[21, 128\] codes"),
    "odd rows": (state(shape=[512, 5]), "in rows of whole bytes"),
    "no runs": (state(blocksize=0), "blocksize 0 is no size"),
    "runs of another size": (state(blocksize=32), r"its shape is \[40\].*\[80\]"),
    "nested runs of another size": (state(nested_blocksize=5), r"its shape is \[10\].*\[8\]"),
    "offset": (state(nested_offset="1"), "nested_offset '1' is no number"),
    "offset NaN": (state(nested_offset=float("nan")), "nested_offset nan is no number"),
    "no weight": ({X: None}, f"{X}, which it is decoded with"),
    "no values": ({f"{X}.quant_map": None}, "quant_map, which it is decoded with"),
    "too few values": ({f"{X}.quant_map": TABLE[:15]}, r"\[15\]"),
    "values NaN": ({f"{X}.quant_map": np.full(16, np.nan, np.float32)}, "scale 0 is NaN"),
    "no absmax": ({f"{X}.absmax": None}, "absmax, which it is decoded with"),
    "no nested absmax": ({f"{X}.nested_absmax": None}, "nested_absmax, which it is decoded with"),
    "nested values of another type": ({f"{X}.nested_quant_map": np.zeros(256, np.uint8)}, "it is U8"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage(tmp_path: Path, damage: str) -> None:
    tensors, words = DAMAGE[damage]
    refused(stored(tmp_path, FOUR, {name: values for name, values in {**GOOD, **tensors}.items() if values is not None}), words)


def test_damage_of_eight_bits(tmp_path: Path) -> None:
    scb, layout = X.replace("weight", "SCB"), X.replace("weight", "weight_format")
    refused(stored(tmp_path, EIGHT, {**eight(), X: np.ones((20, 64), np.float32)}), "it is F32")
    refused(stored(tmp_path, EIGHT, {**eight(), scb: np.ones(19, np.float32)}), r"its shape is \[19\]")
    refused(stored(tmp_path, EIGHT, {**eight(), scb: np.full(20, np.inf, np.float32)}), "infinite")
    refused(stored(tmp_path, EIGHT, {**eight(), layout: np.ones((), np.uint8)}), "layout 1 is not read")
