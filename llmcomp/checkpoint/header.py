"""The header of a safetensors file, read as untrusted input: every claim is checked against the file before a byte of data is."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

from llmcomp.checkpoint.checkpoint import TensorInfo
from llmcomp.errors import CheckpointError

MAX_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library."""
MAX_RANK = 16
MAX_NAME = 1000
ITEM_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
DAMAGED = "Download or copy the file again"
LFS = b"version "
"""First 8 bytes of what Git leaves in place of a large file; as the length of a header they are far beyond the limit."""


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Tensors of one file by name, in file order.

    Raises:
        CheckpointError: the file is truncated, or its header says what is not so.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise CheckpointError(str(path), f"it has {size} bytes, too few for a safetensors file", DAMAGED)
        if start == LFS:
            raise pointer(path)
        length = int.from_bytes(start, "little")
        if length > MAX_HEADER:
            raise CheckpointError(str(path), f"its header claims {length} bytes, more than the format allows", DAMAGED)
        if 8 + length > size:
            raise CheckpointError(str(path), f"truncated: the header claims {length} bytes and the file has {size}", DAMAGED)
        raw = file.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(str(path), f"its header is not JSON ({error})", DAMAGED) from None
    if not isinstance(header, dict):
        raise CheckpointError(str(path), "its header is not a JSON object", DAMAGED)
    header.pop("__metadata__", None)
    odd = next((name for name in header if not is_name(name)), None)
    if odd is not None:
        raise CheckpointError(str(path), f"its header has a tensor of the name {ascii(odd)[:200]}", "Do not use this checkpoint")
    data = 8 + length
    tensors = {name: _tensor(path, name, entry, data) for name, entry in header.items()}
    position = data
    for info in sorted(tensors.values(), key=lambda t: (t.begin, t.end)):
        if info.begin != position:
            kind = "overlaps the one before it" if info.begin < position else "leaves a hole before it"
            raise CheckpointError(str(path), f"header: tensor {info.name} {kind}", DAMAGED)
        position = info.end
    if position > size:
        raise CheckpointError(str(path), f"truncated: the header wants {position} bytes and the file has {size}", DAMAGED)
    if position < size:
        raise CheckpointError(str(path), f"{size - position} bytes follow the last tensor that its header names", DAMAGED)
    return tensors


def pointer(path: Path) -> CheckpointError:
    """The error for a file that was cloned without its contents."""
    return CheckpointError(str(path), "it is a pointer of Git LFS, not the file itself", "Run `git lfs pull` in the folder, or download it")


def is_name(name: str) -> bool:
    """Whether it can be a tensor's name: it will stand in messages and reports, where control characters have no business."""
    return 0 < len(name) <= MAX_NAME and name.isprintable()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{ascii(key)[:200]} stands in it twice")
        found[key] = value
    return found


def _tensor(path: Path, name: str, entry: Any, data: int) -> TensorInfo:
    def wrong(what: str) -> CheckpointError:
        return CheckpointError(str(path), f"header: tensor {name}: {what}", DAMAGED)

    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise wrong("dtype, shape or data_offsets is missing")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BITS:
        raise wrong(f"unknown type {str(dtype)[:40]!r}")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(type(d) is int and 0 <= d < 1 << 40 for d in shape):
        raise wrong("its shape is no list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(o) is int and 0 <= o < 1 << 60 for o in offsets):
        raise wrong("its data_offsets are no pair of positions")
    begin, end = offsets
    wanted = -(-prod(shape) * ITEM_BITS[dtype] // 8)
    if end - begin != wanted:
        raise wrong(f"{dtype} {shape} takes {wanted} bytes, its data_offsets span {end - begin}")
    return TensorInfo(name, dtype, tuple(shape), path, data + begin, data + end)
