"""NNCF's sensitivity metrics and KL by their definitions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def int8_asym(w: np.ndarray) -> np.ndarray:
    """What each row is after 256 even levels between its least and largest value, 0 among them."""
    back = np.empty(w.shape)
    for i, row in enumerate(w.astype(np.float64)):
        low, high = min(0.0, row.min()), max(0.0, row.max())
        scale = (high - low) / 255
        zero = np.clip(-np.rint(low / scale), 0, 255)
        back[i] = (np.clip(np.rint(row / scale + zero), 0, 255) - zero) * scale
    return back


def metrics(w: np.ndarray, samples: Sequence[np.ndarray]) -> dict[str, float]:
    """All five of w [out, in] that read samples [tokens, in]."""
    difference = w.astype(np.float64) - int8_asym(w)
    weight = 1 / (max(np.mean(row**2) for row in difference) + 2.0**-23)
    many = [x.astype(np.float64) for x in samples]
    return {
        "weight_quantization_error": weight,
        "hessian_input_activation": np.linalg.norm(difference) * 2 * np.mean([np.mean(x**2) for x in many]),
        "mean_activation_variance": weight * np.mean([x.var(0).mean() for x in many]),
        "max_activation_variance": weight * np.mean([x.var(0).max() for x in many]),
        "mean_activation_magnitude": weight * np.mean([np.abs(x).max(0).mean() for x in many]),
    }


def divergence(z: np.ndarray, y: np.ndarray) -> np.ndarray:
    """KL(softmax z || softmax y) of each row."""
    p, q = (x - np.logaddexp.reduce(x, -1, keepdims=True) for x in (z.astype(np.float64), y.astype(np.float64)))
    return (np.exp(p) * (p - q)).sum(-1)
