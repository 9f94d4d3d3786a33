"""The least that reads a source: by the specification of safetensors, with struct, json and numpy alone."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np


def split(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """(header, data)."""
    (length,) = struct.unpack_from("<Q", raw)
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def joined(header: Any, data: bytes) -> bytes:
    """A file of any header, one in bytes as it is."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensors(folder: Path) -> dict[str, np.ndarray]:
    """All that its safetensors files hold, floats as f32, others as their bytes."""
    found: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        header, data = split(path.read_bytes())
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                found[name] = numbers(entry["dtype"], data[begin:end], entry["shape"])
    return found


def numbers(dtype: str, raw: bytes, shape: list[int]) -> np.ndarray:
    if dtype == "BF16":
        # The upper half of an f32.
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4").reshape(shape)
    if dtype in ("F16", "F32"):
        return np.frombuffer(raw, {"F16": "<f2", "F32": "<f4"}[dtype]).astype(np.float32).reshape(shape)
    return np.frombuffer(raw, np.uint8)
