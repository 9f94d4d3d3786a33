"""What a number becomes in each format once scale and zero point are known: the nearest of the levels."""

from __future__ import annotations

import numpy as np

from llmcomp import formats
from llmcomp.formats.codebook import CB4
from tests.reference.minmax import E2M1, E4M3, QLORA, nearest_float


def nearest(fmt: formats.Format, t: np.ndarray, scale: np.ndarray, zero_point: np.ndarray | float = 0.0) -> np.ndarray:
    """t [n] with a scale for each -> the values [n]. Of two equally near levels of a table the lower, of integers and floats the even one."""
    x = t / scale + zero_point
    if fmt.name.startswith("int"):
        least = 0 if fmt.zero_point_type else -(2 ** (fmt.bits - 1))
        return (np.clip(np.rint(x), least, least + 2**fmt.bits - 1) - zero_point) * scale
    # An adaptive codebook has CB4's levels until it is fitted.
    tables = {"nf4": QLORA, "cb4": np.array(CB4), formats.ADAPTIVE: np.array(CB4)}
    if fmt.name in tables:
        table = tables[fmt.name]
        return table[np.abs(x[:, None] - table).argmin(axis=1)] * scale
    magnitudes = E4M3 if fmt.bits == 8 else E2M1
    codes = nearest_float(x[:, None], np.ones(len(x)), magnitudes)[:, 0].astype(int)
    return np.copysign(magnitudes[codes & (127 if fmt.bits == 8 else 7)], x) * scale


def stored_scale(scale: np.ndarray) -> np.ndarray:
    """f16 where it is normal there."""
    with np.errstate(over="ignore"):
        narrow = np.float64(np.float16(np.float32(scale)))
    fits = (np.abs(scale) >= 2.0**-14) & (np.abs(scale) <= 65504)
    return np.where(fits, narrow, np.float64(np.float32(scale)))
