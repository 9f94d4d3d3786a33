"""Quantizing row tiles with compiled rules."""

from __future__ import annotations

import os
import platform
import threading
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import openvino as ov
from numpy.typing import NDArray

from llmcomp import formats
from llmcomp.formats import Format, grouped_shape, pack
from llmcomp.kernels.finite import non_finite
from llmcomp.kernels.trace import CHECK, TYPES, Trace, trace

NUMPY_BELOW = 1 << 14
"""Weights below which numpy is as fast as a compiled rule, and nothing has to be compiled."""
ONE_PASS = {"SNIPPETS_MODE": "IGNORE_CALLBACK"}
"""Makes the plugin fuse a chain of comparisons into one kernel, which it else does for static shapes only (measured: NF4 four times faster)."""
SPELLING = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(ml_dtypes.bfloat16): "BF16"}


@dataclass(frozen=True)
class Tile:
    """Rows of a compressed weight, as they are stored; scales are f32, their stored type is chosen when the whole weight is known."""

    codes: NDArray[np.uint8]
    """Packed, 1-D."""
    scale: NDArray[np.float32]
    """[rows, groups, 1], or [rows, 1] per channel."""
    zero_point: NDArray[np.uint8] | None
    """Packed, 1-D."""
    finite: bool
    """False if the rows hold NaN or Inf, or so large values that their sum overflows: `non_finite` tells."""


class _Cache:
    """Compiled rules, shared; infer requests, one per thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._generation = 0
        self._compiled: dict[tuple[Format, str], tuple[Any, tuple[str, ...]]] = {}
        self._local = threading.local()

    def request(self, fmt: Format, dtype: str) -> tuple[Any, tuple[str, ...]]:
        if getattr(self._local, "generation", None) != self._generation:
            self._local.requests, self._local.generation = {}, self._generation
        requests: dict[tuple[Format, str], tuple[Any, tuple[str, ...]]] = self._local.requests
        key = (fmt, dtype)
        if key not in requests:
            with self._lock:
                if key not in self._compiled:
                    traced = trace(fmt, dtype)
                    self._compiled[key] = (_compile(traced), traced.names)
                compiled, names = self._compiled[key]
            requests[key] = (compiled.create_infer_request(), names)
        return requests[key]

    def clear(self) -> None:
        with self._lock:
            self._compiled.clear()
            self._generation += 1


def _compile(traced: Trace) -> Any:
    streams = os.cpu_count() or 1
    properties = {"INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": streams, "INFERENCE_NUM_THREADS": streams}
    if traced.ranked and platform.machine().lower() in ("x86_64", "amd64"):
        try:
            return ov.Core().compile_model(traced.model, "CPU", {**properties, **ONE_PASS})
        except RuntimeError as error:
            # An option that the plugin does not document may go; the result is the same without it.
            if next(iter(ONE_PASS)) not in str(error):
                raise
    return ov.Core().compile_model(traced.model, "CPU", properties)


_CACHE = _Cache()


def clear_cache() -> None:
    """Forget all compiled rules and give their memory back; threads drop their requests at their next call."""
    _CACHE.clear()


def quantize_rows(fmt: Format, w: NDArray[Any], group_size: int) -> Tile:
    """Round rows [rows, in] by the format's rule, as `formats.quantize` does, to the bit.

    `w` is f32, f16 or bf16, C-contiguous; a read-only mapping is read in place. For 4-bit codes give an even number of rows except at a
    weight's end, so that tiles join at whole bytes.

    Raises:
        GroupSizeError: the group size does not divide the rows.
    """
    grouped = grouped_shape(w.shape, group_size)
    rows, size = w.shape[0], grouped[-1]
    if w.size < NUMPY_BELOW:
        weight = formats.quantize(fmt, w, group_size)
        packed = weight.packed()
        return Tile(packed["codes"], weight.scale, packed.get("zero_point"), non_finite(w)[0] == 0)
    dtype = SPELLING[w.dtype]
    request, names = _CACHE.request(fmt, dtype)
    results = request.infer([_tensor(w.reshape(rows, -1, size), dtype)], share_outputs=True)
    found = {name: results[i] for i, name in enumerate(names)}
    parts = {part.name: part for part in fmt.parts(w.shape, group_size)}
    # Everything is copied or packed: the request's memory is overwritten by the thread's next tile.
    scale = np.array(found["scale"], np.float32).reshape(parts["scale"].shape)
    codes, zero_point = (pack(found[n], parts[n].element_type) if n in found else None for n in ("codes", "zero_point"))
    assert codes is not None
    codes = np.array(codes) if np.may_share_memory(codes, found["codes"]) else codes
    if zero_point is not None and np.may_share_memory(zero_point, found["zero_point"]):
        zero_point = np.array(zero_point)
    return Tile(codes, scale, zero_point, bool(np.isfinite(found[CHECK]).all()))


def _tensor(w: NDArray[Any], dtype: str) -> ov.Tensor:
    """A tensor over the array's own memory where the binding allows it: it refuses read-only arrays, so such a tile is copied (a cache's worth)."""
    raw = np.ascontiguousarray(w).view(np.uint16 if w.dtype.itemsize == 2 else np.float32)
    if not raw.flags.writeable:
        raw = raw.copy()
    return ov.Tensor(raw, ov.Shape(list(w.shape)), TYPES[dtype])
