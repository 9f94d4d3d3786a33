"""The rule `minmax` for integers, from its definition (NNCF docs; facts in the README of the formats): f32 scales, everything else in float64."""

from __future__ import annotations

import numpy as np

EPS = np.float32(2.0**-23)


def symmetric(group: np.ndarray, bits: int) -> tuple[list[int], np.float32]:
    """(codes, scale) of one group: the weight of largest magnitude lands on the lowest level, so the scale may be negative."""
    lowest = 2 ** (bits - 1)
    below, above = abs(group.min()), group.max()
    scale = np.float32(below / lowest) if below >= above else np.float32(-above / lowest)
    if abs(scale) < EPS:
        scale = EPS
    return [int(np.clip(half_to_even(w, scale), -lowest, lowest - 1)) for w in group], scale


def asymmetric(group: np.ndarray, bits: int) -> tuple[list[int], np.float32, int]:
    """(codes, scale, zero point) of one group; the range always contains zero."""
    highest = 2**bits - 1
    low, high = min(np.float32(0), group.min()), max(np.float32(0), group.max())
    scale = np.float32(np.float32(high - low) / np.float32(highest))
    if abs(scale) < EPS:
        scale = EPS
    zero = int(np.clip(-half_to_even(low, scale), 0, highest))
    codes = []
    for w in group:
        # The zero point is added before rounding, in f32 as the weight's quotient is.
        shifted = np.float32(np.float32(w / scale) + np.float32(zero))
        codes.append(int(np.clip(np.rint(np.float64(shifted)), 0, highest)))
    return codes, scale, zero


def half_to_even(w: np.float32, scale: np.float32) -> float:
    """The quotient as f32 has it, rounded half to even."""
    return float(np.rint(np.float64(np.float32(w / scale))))


def nearest_level(group: np.ndarray, levels: np.ndarray) -> tuple[list[int], np.float32]:
    """(codes, scale): the nearest of a sorted table after scaling by the largest magnitude; a tie takes the lower level."""
    scale = np.float32(np.abs(group).max())
    if scale < EPS:
        scale = EPS
    codes = []
    for w in group:
        distance = np.abs(levels.astype(np.float64) - np.float64(np.float32(w / scale)))
        codes.append(int(np.argmin(distance)))
    return codes, scale
