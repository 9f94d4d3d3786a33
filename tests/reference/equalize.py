"""Equalizing columns, weight by weight in float64."""

from __future__ import annotations

import numpy as np


def factors(readers: list[tuple[np.ndarray, np.ndarray]], free: np.ndarray) -> np.ndarray:
    """t[c]: the inverse of (mean of |w|^(1/4) over every weight but zeros that reads channel c)^4, with geometric mean 1 over the free channels."""
    t = np.ones(len(free))
    for c in np.flatnonzero(free):
        values = [abs(float(v)) ** 0.25 for w, labels in readers for v in w[:, labels == c].reshape(-1) if v]
        t[c] = (sum(values) / len(values)) ** -4
    t[free] /= np.exp(np.log(t[free]).mean())
    return t
