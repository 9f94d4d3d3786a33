"""A folder with hand-made stored tensors, types that numpy does not know among them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from llmcomp import checkpoint, formats
from llmcomp.checkpoint import Checkpoint
from llmcomp.checkpoint.encoded import Encoded, Form, Lines
from llmcomp.errors import CheckpointError
from llmcomp.formats.nvfp4 import NvFp4

KINDS = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int8": "I8",
    "uint8": "U8",
    "int32": "I32",
    "int64": "I64",
}
NORM = "model.norm.weight"


def save(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """A safetensors file, by its specification: the length of the header, the header, the bytes."""
    header: dict[str, Any] = {}
    data = b""
    for name, values in tensors.items():
        raw = np.ascontiguousarray(values).tobytes()
        header[name] = {
            "dtype": KINDS[values.dtype.name],
            "shape": list(values.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def stored(folder: Path, settings: Any, tensors: dict[str, np.ndarray], **config: Any) -> Path:
    """A checkpoint of these tensors and a plain one, with these quantization settings."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": settings, **config}))
    save(folder / "model.safetensors", {NORM: np.arange(8, dtype=np.float32), **tensors})
    return folder


def check_decoded(opened: Checkpoint, wanted: dict[str, np.ndarray]) -> None:
    """The checkpoint holds these and the plain tensor; rows, picked rows and windows are what they are of the whole."""
    assert set(opened.tensors) == {NORM, *wanted}
    assert not opened.plain and "quantization_config" not in opened.config
    np.testing.assert_array_equal(opened.read(NORM), np.arange(8, dtype=np.float32))
    for name, values in wanted.items():
        info = opened.tensors[name]
        assert (info.name, info.dtype, info.shape) == (name, "F32", values.shape)
        assert info.file.is_file() and 0 < info.begin < info.end <= info.file.stat().st_size
        whole = opened.read(name)
        assert whole.dtype == np.float32 and values.dtype == np.float32
        np.testing.assert_array_equal(whole, values)
        count = len(values)
        for start, stop in ((0, 1), (count // 3, count - 1), (count - 1, count + 5), (2, 2)):
            np.testing.assert_array_equal(opened.rows(name, start, stop), values[start:stop])
            opened.prefetch(name, start, min(stop, count))
        numbers = np.random.default_rng(0).permutation(count)[: max(count // 2, 1)]
        np.testing.assert_array_equal(opened.picked(name, numbers), values[numbers])
        matrix, index = (values, None) if values.ndim == 2 else (values[-1], count - 1)
        rows, columns = slice(1, math.ceil(matrix.shape[0] / 2)), slice(matrix.shape[1] // 3, matrix.shape[1] - 1)
        np.testing.assert_array_equal(opened.window(name, index, rows, columns), matrix[rows, columns])
        check_held(opened.encoded(name), values)


def check_held(encoded: Encoded | None, values: np.ndarray) -> None:
    """In each of its forms the tensor's lines are its values to the bit, whichever of them are asked for."""
    assert encoded is not None and encoded.method and bool(encoded.held.forms) != bool(encoded.held.reason)
    for form in encoded.held.forms:
        for index in (None,) if values.ndim == 2 else range(len(values)):
            wanted = values if index is None else values[index]
            wanted = wanted.T if encoded.crosswise else wanted
            for start, stop in ((0, len(wanted)), (len(wanted) // 2, len(wanted) - 1)):
                found = weight_of(form, encoded.lines(form, index, start, stop), encoded.second)
                if form.sorted:
                    found[:, encoded.order] = found.copy()
                np.testing.assert_array_equal(found, wanted[start:stop])


def weight_of(form: Form, lines: Lines, second: float = 1.0) -> np.ndarray:
    """What codes in a form stand for, its scales as they are stored, by the format's own decoder. `second` is the scale of NVFP4's scales."""
    fmt, shape = formats.get(form.format), lines.codes.shape
    grouped = formats.grouped_shape(shape, form.group_size)
    # As their types hold them.
    assert formats.pack(lines.codes, fmt.code_type).size == formats.packed_bytes(shape, fmt.code_type)
    codes = formats.unpack(formats.pack(lines.codes, fmt.code_type), fmt.code_type, grouped)
    scale = lines.scale.astype(np.float16) if form.scale_type == "f16" else lines.scale
    if isinstance(fmt, NvFp4):
        scale = fmt.load_scale(fmt.store_under(scale[..., None], second))[..., 0]
    zeros = None
    if lines.zero_point is not None:
        kind = str(fmt.zero_point_type)
        zeros = formats.unpack(formats.pack(lines.zero_point, kind), kind, lines.scale.shape).reshape(*grouped[:-1], 1)
    numbers = formats.NUMPY.numbers(codes, fmt.code_type)
    return np.asarray(fmt.decode(formats.NUMPY, numbers, np.float32(scale).reshape(*grouped[:-1], 1), zeros), np.float32).reshape(shape)


def refused(folder: Path, words: str) -> None:
    """Opening the folder says so."""
    with pytest.raises(CheckpointError, match=words) as caught:
        checkpoint.open(folder)
    assert str(folder) in str(caught.value)


def bf16(values: Any) -> np.ndarray:
    return np.asarray(values).astype(ml_dtypes.bfloat16)
