"""Settings and tensors changed at random: a checkpoint opens and is read, or CheckpointError says why; nothing else comes out."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from llmcomp import checkpoint
from llmcomp.errors import CheckpointError
from tests.checkpoint.encodings import (
    test_auto_round,
    test_awq,
    test_bitsandbytes,
    test_compressed_tensors,
    test_fp8,
    test_gptq,
    test_modelopt,
    test_mxfp4,
)
from tests.checkpoint.encodings.store import stored

GOOD: dict[str, tuple[dict[str, Any], dict[str, np.ndarray]]] = {
    "awq": (test_awq.SETTINGS, test_awq.GOOD),
    "bitsandbytes 4": (test_bitsandbytes.FOUR, test_bitsandbytes.GOOD),
    "bitsandbytes 8": (test_bitsandbytes.EIGHT, test_bitsandbytes.eight()),
    "compressed-tensors": (
        test_compressed_tensors.settings(test_compressed_tensors.scheme(symmetric=False)),
        {**test_compressed_tensors.GOOD, f"{test_compressed_tensors.X}.weight_g_idx": np.zeros(96, np.int32)},
    ),
    "fp8": (test_fp8.SETTINGS, test_fp8.GOOD),
    "gptq": (test_gptq.settings(), test_gptq.GOOD),
    "mxfp4": (test_mxfp4.SETTINGS, test_mxfp4.GOOD),
    "modelopt": (test_modelopt.SETTINGS, test_modelopt.GOOD),
    "nvfp4 of compressed-tensors": (test_modelopt.COMPRESSED, test_modelopt.made(20, 96, True)[0]),
    "auto-round": (test_auto_round.settings("auto_round:auto_gptq"), test_gptq.GOOD),
}
JUNK: tuple[Any, ...] = (None, True, -1, 0, 1, 3, 16, 1 << 70, 0.5, "", "gptq", "\x1b[2J", [], [1, 2], [[], {}], {}, {"a": 1}, "x" * 10_000)
KINDS = (np.float32, np.float16, np.int8, np.uint8, np.int32, np.int64, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16)


def changed(value: Any, rng: np.random.Generator) -> Any:
    """`value` with one thing in it replaced, however deep."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = str(rng.choice(list(value)))
        return {**value, key: changed(value[key], rng)}
    return JUNK[rng.integers(len(JUNK))]


def other(values: np.ndarray, rng: np.random.Generator) -> np.ndarray | None:
    """Other numbers, another type, another shape, or nothing."""
    way = rng.integers(4)
    if way == 0:
        return None
    if way == 1:
        return rng.integers(0, 256, values.nbytes).astype(np.uint8).view(values.dtype).reshape(values.shape)
    if way == 2:
        return np.zeros(values.shape, KINDS[rng.integers(len(KINDS))])
    shape = [(), (0,), (1,), values.shape[::-1], (*values.shape, 1), values.shape[1:], (1, *values.shape), (3, 0, 4)]
    return np.ones(shape[rng.integers(len(shape))], values.dtype)


@pytest.mark.parametrize("kind", GOOD)
def test_nothing_else_comes_out(tmp_path: Path, kind: str) -> None:
    settings, tensors = GOOD[kind]
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        told, kept = settings, dict(tensors)
        if rng.random() < 0.4:
            told = changed(settings, rng)
        else:
            name = str(rng.choice(list(tensors)))
            found = other(kept.pop(name), rng)
            if found is not None:
                kept[name] = found
        stored(tmp_path, told, kept)
        try:
            opened = checkpoint.open(tmp_path)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for name in opened.tensors:
                    opened.read(name)
                    encoded = opened.encoded(name)
                    for form in encoded.held.forms if encoded is not None else ():
                        lines = encoded.lines(form, 0 if len(opened.tensors[name].shape) == 3 else None, 0, 1)
                        assert lines.codes.shape[0] == lines.scale.shape[0] == 1
        except CheckpointError as error:
            assert len(str(error)) < 1000 and str(error).isprintable()
            refused += 1
    assert refused > 100
