"""QERA by its formula, in float64 (Zhang et al. 2024, theorem 1)."""

from __future__ import annotations

import numpy as np


def correction(error: np.ndarray, h: np.ndarray, rank: int) -> np.ndarray:
    """SVD_rank(E H^(1/2)) H^(-1/2) for a positive definite H."""
    values, vectors = np.linalg.eigh(np.float64(h))
    root, inverse = (vectors * values**p @ vectors.T for p in (0.5, -0.5))
    u, s, v = np.linalg.svd(np.float64(error) @ root, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ v[:rank] @ inverse
