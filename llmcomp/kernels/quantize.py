"""Row tiles through compiled rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp import formats
from llmcomp.formats import NUMPY, CompressedWeight, Format, grouped_shape, pack
from llmcomp.formats.array import f8e4m3_of_f16
from llmcomp.kernels.finite import non_finite
from llmcomp.kernels.run import SPELLING, Given, run
from llmcomp.kernels.trace import CHECK, TRACED_LEVELS, Job, Kind, Ranges

NUMPY_BELOW = 1 << 14
"""Weights below which numpy is as fast as a compiled rule, and nothing has to be compiled."""


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


NOTHING = Given()


def quantize_rows(fmt: Format, w: NDArray[Any], group_size: int, rule: str | Ranges = "minmax", given: Given = NOTHING) -> Tile:
    """Round rows [rows, in] by the format's rule, as `formats.quantize` does, to the bit.

    `w` is f32, f16 or bf16, C-contiguous; a read-only mapping is read in place. For codes of less than eight bits give a multiple of eight
    rows except at a weight's end, so that tiles join at whole bytes.

    Raises:
        GroupSizeError: the group size does not divide the rows.
        OptionError: the format has no such rule.
    """
    found = _run("quantize", fmt, w, group_size, rule, given)
    if isinstance(found, CompressedWeight):
        packed = found.packed()
        return Tile(packed["codes"], found.scale, packed.get("zero_point") if fmt.zero_point_type else None, non_finite(w)[0] == 0)
    per_group = (*grouped_shape(w.shape, group_size)[:-1], 1)
    scale = given.scale if given.scale is not None else found["scale"].reshape(per_group)
    zero_point = found.get("zero_point", given.zero_point)
    zeros = None if zero_point is None else pack(zero_point.astype(np.uint8, copy=False), str(fmt.zero_point_type))
    codes = f8e4m3_of_f16(found["codes"]) if fmt.code_type == "f8e4m3" else found["codes"]
    return Tile(pack(codes, fmt.code_type), scale, zeros, bool(np.isfinite(found[CHECK]).all()))


def roundtrip_rows(
    fmt: Format, w: NDArray[Any], group_size: int, rule: str | Ranges = "minmax", given: Given = NOTHING
) -> NDArray[np.float32]:
    """What rows [rows, in] are after quantizing and back, with the f32 scale. Times the factors, if there are any.

    Raises:
        GroupSizeError, OptionError: as `quantize_rows`.
    """
    found = _run("roundtrip", fmt, w, group_size, rule, given)
    back = _decoded(found) if isinstance(found, CompressedWeight) else found["w"]
    return np.asarray(back, np.float32).reshape(w.shape)


def error_rows(fmt: Format, w: NDArray[Any], group_size: int, rule: str | Ranges = "minmax", given: Given = NOTHING) -> NDArray[np.float32]:
    """Squared error of each group of rows [rows, in], [rows, groups]; summed with `given.importance` as weights.

    Sums differ from numpy's in the last bits, since the order of summation does.

    Raises:
        GroupSizeError, OptionError: as `quantize_rows`.
    """
    found = _run("error", fmt, w, group_size, rule, given)
    grouped = grouped_shape(w.shape, group_size)
    if not isinstance(found, CompressedWeight):
        return found["error"]
    squares = np.square(given.folded(w).reshape(grouped) - _decoded(found))
    weights = 1.0 if given.importance is None else given.importance.reshape(grouped_shape((1, w.shape[1]), group_size))
    return np.asarray((squares * weights).sum(-1), np.float32).reshape(w.shape[0], -1)


def _decoded(weight: CompressedWeight) -> Any:
    zero_point = None if weight.zero_point is None else weight.zero_point.astype(np.float32)
    return weight.format.decode(NUMPY, NUMPY.numbers(weight.codes, weight.format.code_type), weight.scale, zero_point)


def _run(
    kind: Kind, fmt: Format, w: NDArray[Any], group_size: int, rule: str | Ranges, given: Given
) -> CompressedWeight | dict[str, NDArray[Any]]:
    """The results of a compiled job; or numpy's, where compiling does not pay."""
    rows, size = w.shape[0], grouped_shape(w.shape, group_size)[-1]
    if w.size < NUMPY_BELOW or fmt.level_count > TRACED_LEVELS or not fmt.common:
        scale, zero_point = given.scale, given.zero_point
        wide = given.folded(w)
        if scale is None and not isinstance(rule, str):
            importance = None if given.importance is None else given.importance.reshape(1, -1, size)
            ranges = rule(NUMPY, fmt, wide.reshape(rows, -1, size), importance)
            per_group = (*grouped_shape(w.shape, group_size)[:-1], 1)
            scale, zero_point = (r if r is None else r.reshape(per_group) for r in (ranges["scale"], ranges.get("zero_point")))
        return formats.quantize(fmt, wide, group_size, rule if isinstance(rule, str) else rule.__name__, scale, zero_point)
    if isinstance(rule, str):
        fmt.check_rule(rule)
    job = Job(
        kind,
        fmt,
        SPELLING[w.dtype],
        size,
        None if given.scale is not None else rule,
        given.columns is not None,
        given.rows is not None,
        given.importance is not None and (kind == "error" or not isinstance(rule, str)),
    )
    return run(job, w, size, given)
