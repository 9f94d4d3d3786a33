"""The rows by which a layer's errors are told, and what plain rounding would make of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmcomp import formats

SAMPLES, SAMPLE_ROWS = 4, 4
"""The errors of a layer are taken from this many evenly spaced runs of this many rows."""
PLAIN = "minmax"
"""The rule that everything is compared with: scales from each group's extremes."""


def sampled(rows: int, start: int, stop: int) -> list[int]:
    """Those of the sampled rows of a layer of `rows` that are in [start, stop)."""
    step = max(1, rows // SAMPLES)
    return [row for first in range(start + -start % step, stop, step) for row in range(first, min(first + SAMPLE_ROWS, stop, first + step))]


def plain_squares(fmt: formats.Format, w: NDArray[np.float32], group_size: int) -> tuple[float, float]:
    """Rows [rows, in] of a source, without any factor: sums of squares of what rounding to nearest under `PLAIN` changes, and of themselves."""
    back = formats.quantize(fmt, w, group_size, PLAIN).stored().dequantize()
    return float(np.square(w - back, dtype=np.float64).sum()), float(np.square(w, dtype=np.float64).sum())
