"""Every format's rules from their definitions (NNCF docs, OCP Microscaling 1.0, QLoRA): f32 scales, everything else in float64.

Arrays are [groups, size]; each function gives integral codes of that shape and scales of [groups].
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

EPS = np.float32(2.0**-23)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
"""Magnitudes of codes 0 .. 7, OCP table 5.3.3; codes 8 .. 15 are their negatives."""
E4M3 = np.array([(1 + m / 8) * 2.0 ** (e - 7) if e else m / 8 * 2.0**-6 for e in range(16) for m in range(8)][:127])
"""Magnitudes of bytes 0 .. 126; 127 is NaN, bytes from 128 on are their negatives."""
QLORA = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip
"""Dettmers et al. 2023, appendix E."""


def guarded(scale: np.ndarray) -> np.ndarray:
    narrow = scale.astype(np.float32)
    return np.where(np.abs(narrow) < EPS, EPS, narrow)


def quotient(w: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The quotient as f32 has it."""
    return np.float64(np.float32(w) / np.float32(scale)[:, None])


def symmetric(w: np.ndarray, bits: int, rule: str = "minmax") -> tuple[np.ndarray, np.ndarray]:
    """minmax: the weight of largest magnitude lands on the lowest level, so the scale may be negative. absolute: on +-(2^(b-1) - 1)."""
    lowest = 2 ** (bits - 1)
    below, above = np.abs(w.min(1)), w.max(1)
    ends = {"minmax": np.where(below >= above, below, -above) / np.float64(lowest), "absolute": np.float64(np.abs(w).max(1)) / (lowest - 1)}
    scale = guarded(ends[rule])
    return np.clip(np.rint(quotient(w, scale)), -lowest, lowest - 1), scale


def asymmetric(w: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """With the zero points; the range always contains zero."""
    highest = 2**bits - 1
    low, high = np.minimum(np.float32(0), w.min(1)), np.maximum(np.float32(0), w.max(1))
    scale = guarded(np.float64(high - low) / highest)
    zero = np.clip(-np.rint(quotient(low[:, None], scale)[:, 0]), 0, highest)
    # The zero point is added before rounding, in f32 as the weight's quotient is.
    shifted = np.float32(quotient(w, scale)) + np.float32(zero)[:, None]
    return np.clip(np.rint(np.float64(shifted)), 0, highest), scale, zero


def nearest_level(w: np.ndarray, levels: np.ndarray, rule: str = "minmax") -> tuple[np.ndarray, np.ndarray]:
    """The nearest of an ascending table after scaling by the largest magnitude; a tie takes the lower level.

    Middles between levels are f32, as NNCF has them.
    """
    extreme = np.abs(w).max(1)
    if rule == "signed":
        # Of a positive and a negative weight of the largest magnitude the negative decides.
        extreme = np.where(w.min(1) == -extreme, -extreme, extreme)
    scale = guarded(np.float64(extreme) / np.abs(levels).max())
    middles = np.float64(np.float32((levels[1:] + levels[:-1]) / 2))
    return np.searchsorted(middles, quotient(w, scale)), scale


def nearest_float(w: np.ndarray, scale: np.ndarray, magnitudes: np.ndarray) -> np.ndarray:
    """Codes of a float type given by its magnitudes: the nearest, of two the even code, above the largest the largest."""
    x = quotient(w, scale)
    if len(magnitudes) == len(E4M3):
        # OpenVINO and NNCF convert to f8 by way of f16, which rounds twice.
        with np.errstate(over="ignore"):
            x = np.float64(np.float16(np.clip(x, -magnitudes[-1], magnitudes[-1])))
    right = np.clip(np.searchsorted(magnitudes, np.abs(x)), 1, len(magnitudes) - 1)
    to_left, to_right = np.abs(x) - magnitudes[right - 1], magnitudes[right] - np.abs(x)
    code = np.where((to_left < to_right) | ((to_left == to_right) & (right % 2 == 1)), right - 1, right)
    # f8e4m3 keeps the sign of any zero, E2M1 that of a quotient below zero.
    negative = np.signbit(x) if len(magnitudes) == len(E4M3) else x < 0
    return code + np.where(negative, len(magnitudes) + (len(magnitudes) == len(E4M3)), 0)


def float_scale(w: np.ndarray, magnitudes: np.ndarray) -> np.ndarray:
    return guarded(np.float64(np.abs(w).max(1)) / magnitudes[-1])


def power_scale(w: np.ndarray, magnitudes: np.ndarray, rule: str = "minmax") -> np.ndarray:
    """A power of two for each group, from 2^-23 on, in exact arithmetic."""
    top = Fraction(2) ** (float(magnitudes[-1]).as_integer_ratio()[0].bit_length() - 1)
    mantissa_bits = {len(E2M1): 1, len(E4M3): 3}[len(magnitudes)]
    scales = []
    for amax in np.abs(w).max(1):
        x, least = Fraction(float(amax)), Fraction(2) ** -23
        if rule in ("minmax", "fit"):
            # `fit` lets a group reach 7.25 where the type ends at 6.
            limit, power = Fraction(float(magnitudes[-1])) if rule == "minmax" else Fraction(29, 4), least
            while power * limit < x:
                power *= 2
        elif x < least * top:
            # A magnitude under the least scale counts as that: `even` finds no mantissa to carry from.
            power = least
        else:
            bits = int(np.float32(amax).view(np.int32))
            if rule == "even":
                # torchao's and compressed-tensors' way: half a unit of the element's mantissa, added to the f32's own bits.
                bits += 1 << (23 - mantissa_bits - 1)
            power = Fraction(2) ** ((bits >> 23) - 127) / top
        scales.append(float(power))
    return np.array(scales)
