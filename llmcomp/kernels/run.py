"""Running a compiled job over rows, piece by piece, each piece's results straight into their place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import openvino as ov
from numpy.typing import NDArray

from llmcomp.kernels.cache import CACHE
from llmcomp.kernels.trace import TYPES, Job

PIECE_WEIGHTS = 1 << 19
"""Weights that are computed together: their f32 image (2 MB) stays in a core's own caches, where a whole tile's would go to memory and back;
with fewer the threads wait for each other's Python between them."""
SPELLING = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(ml_dtypes.bfloat16): "BF16"}


@dataclass(frozen=True)
class Given:
    """What goes into a rule beside the weights. Everything is f32."""

    columns: NDArray[np.float32] | None = None
    """[in]: every row is multiplied by it first."""
    rows: NDArray[np.float32] | None = None
    """[rows]: every column is multiplied by it then."""
    importance: NDArray[np.float32] | None = None
    """[in]: weight of each input channel's squared error, for rules that search and for `error_rows`."""
    scale: NDArray[np.float32] | None = None
    """[rows, groups, 1], or [rows, 1] per channel: taken instead of the rule's."""
    zero_point: NDArray[np.float32] | None = None
    """Like the scale, with formats that have one."""

    def folded(self, w: NDArray[Any]) -> NDArray[np.float32]:
        """The weights times the factors."""
        wide = np.asarray(w, np.float32)
        wide = wide if self.columns is None else wide * self.columns
        return wide if self.rows is None else wide * self.rows[:, None]


def run(job: Job, w: NDArray[Any], size: int, given: Given) -> dict[str, NDArray[Any]]:
    """The job's results for w [rows, in] in groups of `size`: per weight [rows, groups, size], per group [rows, groups]."""
    rows, groups = w.shape[0], w.shape[1] // size
    whole: dict[str, NDArray[Any]] = {}
    for name, shape in (("columns", (1, w.shape[1])), ("importance", (1, groups, size))):
        if getattr(given, name) is not None:
            whole[name] = np.ascontiguousarray(getattr(given, name), np.float32).reshape(shape)
    by_row: dict[str, NDArray[Any]] = {"w": _writable(w)}
    for name, width in (("rows", 1), ("scale", groups), ("zero_point", groups)):
        if getattr(given, name) is not None:
            by_row[name] = np.ascontiguousarray(getattr(given, name), np.float32).reshape(rows, width)
    found: dict[str, NDArray[Any]] = {}
    for start, stop in _pieces(rows, w.shape[1]):
        request, traced = CACHE.request(replace(job, ones=(stop - start == 1, groups == 1, size == 1)))
        for i, name in enumerate(traced.inputs):
            array = whole[name] if name in whole else by_row[name][start:stop]
            request.set_input_tensor(i, ov.Tensor(array, ov.Shape(list(array.shape)), TYPES[job.dtype] if name == "w" else ov.Type.f32))
        for i, (name, (kind, rank)) in enumerate(traced.outputs.items()):
            if name not in found:
                found[name] = np.empty((rows, groups, size)[:rank], STORAGE.get(kind, np.uint8))
            array = found[name][start:stop]
            request.set_output_tensor(i, ov.Tensor(array, ov.Shape(list(array.shape)), getattr(ov.Type, kind)))
        # In this thread: start_async would hand the piece to another one and back.
        request.infer({}, share_inputs=True, share_outputs=True)
    return found


STORAGE = {"f32": np.float32, "f16": np.float16, "i8": np.int8, "u8": np.uint8}
"""How numpy holds a result; others are bytes."""


def _pieces(rows: int, width: int) -> Iterator[tuple[int, int]]:
    """Rows [start, stop) of pieces of equal size, the last one aside."""
    pieces = -(-rows * width // PIECE_WEIGHTS)
    step = -(-rows // pieces)
    return ((start, min(start + step, rows)) for start in range(0, rows, step))


def _writable(w: NDArray[Any]) -> NDArray[Any]:
    """Raw numbers of w, in place where the binding allows it: it refuses read-only arrays, so those are copied."""
    raw = np.ascontiguousarray(w).view(np.uint16 if w.dtype.itemsize == 2 else np.float32)
    return raw if raw.flags.writeable else raw.copy()
