"""NaN and Inf by their bit pattern: an exponent of all ones, whatever the type."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

EXPONENTS: dict[Any, tuple[Any, int, int]] = {
    np.dtype(np.float32): (np.uint32, 0x7FFFFFFF, 0x7F800000),
    np.dtype(np.float16): (np.uint16, 0x7FFF, 0x7C00),
    np.dtype(ml_dtypes.bfloat16): (np.uint16, 0x7FFF, 0x7F80),
}
"""Float type -> (unsigned type of its size, everything but the sign, an exponent of all ones)."""
PIECE = 1 << 15
"""Elements looked at together: their masked copy stays in a core's first caches, and small enough for the allocator to reuse its memory."""


def non_finite(w: NDArray[Any]) -> tuple[int, int | None]:
    """(number of NaN and Inf in `w`, flat index of the first or None). `w` is f32, f16 or bf16."""
    unsigned, magnitude, infinite = EXPONENTS[w.dtype]
    flat = np.ascontiguousarray(w).view(unsigned).reshape(-1)
    count, first = 0, None
    for start in range(0, flat.size, PIECE):
        piece = flat[start : start + PIECE] & unsigned(magnitude)
        if piece.max(initial=0) >= infinite:
            bad = np.flatnonzero(piece >= infinite)
            first = start + int(bad[0]) if first is None else first
            count += len(bad)
    return count, first
