"""AWQ's choice by replaying activations, in float64."""

from __future__ import annotations

import numpy as np


def factors(h: np.ndarray, m: np.ndarray, alpha: float, beta: float) -> np.ndarray:
    """t = h^(alpha/2) / m^beta, geometric mean 1."""
    t = h ** (alpha / 2) / m**beta
    return t / np.exp(np.log(t).mean())


def output_error(w: np.ndarray, x: np.ndarray, t: np.ndarray, roundtrip) -> float:  # type: ignore[no-untyped-def]
    """Sum over outputs of the squared error of Q(W t) (x / t), relative to the power of W x."""
    rounded, wanted = roundtrip((w * t).astype(np.float32)).astype(np.float64), x @ w.T.astype(np.float64)
    return float((np.square(x / t @ rounded.T - wanted).sum(0) / np.square(wanted).sum(0)).sum())
