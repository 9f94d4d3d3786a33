"""Weights that have broken quantizers: one name, one array [rows, 64 * k]."""

from __future__ import annotations

import numpy as np

ROWS, WIDTH = 24, 192


def cases() -> dict[str, np.ndarray]:
    """f32 arrays of 24 x 192, by name."""
    rng = np.random.default_rng(7)
    normal = rng.normal(size=(ROWS, WIDTH)).astype(np.float32) * np.float32(0.02)
    outlier = normal.copy()
    outlier[::3, 5] = 3.0
    zeros = normal.copy()
    zeros[3] = 0
    zeros[5, :64] = 0
    zeros[:, 7] = 0
    scale = rng.choice([2.0**-4, 2.0**-7, 1.0], (ROWS, 1))
    ties = (rng.integers(-16, 16, (ROWS, WIDTH)) * 0.5 * scale).astype(np.float32)
    ties[:, ::64] = (-8 * scale).astype(np.float32)
    beside = np.nextafter(ties, rng.choice([-np.inf, np.inf], ties.shape).astype(np.float32))
    minus = zeros.copy()
    minus[minus == 0] = -0.0
    # Largest magnitudes of 6 * 2^k, 448 * 2^k, and neighbours of 6 * 2^k, from below the least scale on: the ends of the OCP types.
    ends = np.repeat(np.float32([[6, 448, 6]]), ROWS, 0) * np.exp2(np.arange(ROWS, dtype=np.float32) - 26)[:, None]
    ends[:, 2] = np.nextafter(ends[:, 2], ends[:, 2] * np.resize(np.float32([0, 2]), ROWS))
    types = (normal / np.abs(normal).max() * np.repeat(ends, 64, 1)).astype(np.float32)
    types[:, ::16] = np.repeat(ends, 4, 1) * rng.choice(np.float32([-1, 1]), (ROWS, WIDTH // 16))
    powers = np.exp2(rng.integers(-12, 4, (ROWS, WIDTH))).astype(np.float32) * rng.choice([-1, 1], (ROWS, WIDTH)).astype(np.float32)
    return {
        "normal": normal,
        "heavy tails": rng.standard_t(3, (ROWS, WIDTH)).astype(np.float32),
        "outlier": outlier,
        "zeros": zeros,
        "all zero": np.zeros((ROWS, WIDTH), np.float32),
        "ties": ties,
        "beside ties": beside,
        "minus zero": minus,
        "ends of types": types,
        "powers of two": powers,
        "equal magnitudes": np.where(rng.random((ROWS, WIDTH)) < 0.5, 0.25, -0.25).astype(np.float32),
        "positive": np.abs(normal) + np.float32(0.01),
        "negative": -np.abs(normal) - np.float32(0.01),
        "constant": np.full((ROWS, WIDTH), 0.3, np.float32),
        "tiny": normal * np.float32(1e-6),
        "subnormal": normal * np.float32(1e-38),
        "at the least scale": (rng.integers(-24, 25, (ROWS, WIDTH)) * 2.0**-24 * rng.choice([1.0, 6.0, 448.0], (ROWS, 1))).astype(
            np.float32
        ),
        "huge": normal * np.float32(1e30),
        "extreme": rng.choice(np.float32([-1e36, -1e-36, 0, 1e-36, 1e36]), (ROWS, WIDTH)),
        "mixed": normal * np.exp2(rng.integers(-20, 20, (ROWS, 1))).astype(np.float32),
    }


CASES = cases()
