"""What a number becomes in each format once scale and zero point are known: the nearest of the format's levels, all tried."""

from __future__ import annotations

import numpy as np

from llmcomp import formats
from llmcomp.formats.codebook import CB4
from tests.reference.minmax import E2M1, E4M3, QLORA


def levels(fmt: formats.Format) -> np.ndarray:
    """Ascending, for scale 1 and zero point 0."""
    if fmt.name.startswith("int"):
        least = 0 if fmt.zero_point_type else -(2 ** (fmt.bits - 1))
        return np.arange(least, least + 2**fmt.bits, dtype=np.float64)
    tables = {"nf4": QLORA, "cb4": np.array(CB4)}
    if fmt.name in tables:
        return tables[fmt.name]
    magnitudes = E4M3 if fmt.bits == 8 else E2M1
    return np.unique(np.concatenate([-magnitudes, magnitudes]))


def nearest(fmt: formats.Format, t: np.ndarray, scale: np.ndarray, zero_point: np.ndarray | float = 0.0) -> np.ndarray:
    """t [n] with a scale for each -> the values [n]; of two equally near levels the lower."""
    x = t / scale + zero_point
    if fmt.bits == 8 and not fmt.name.startswith("int"):
        # Conversion to f8 is by way of f16, see minmax.py.
        x = np.float64(np.float16(np.clip(x, -E4M3[-1], E4M3[-1])))
    table = levels(fmt)
    return (table[np.abs(x[:, None] - table).argmin(axis=1)] - zero_point) * scale


def stored_scale(scale: np.ndarray) -> np.ndarray:
    """f16 where it is normal there."""
    with np.errstate(over="ignore"):
        narrow = np.float64(np.float16(np.float32(scale)))
    fits = (np.abs(scale) >= 2.0**-14) & (np.abs(scale) <= 65504)
    return np.where(fits, narrow, np.float64(np.float32(scale)))
