"""Weighted k-means of numbers on a line, exactly: every cut of the sorted numbers is tried (dynamic programming)."""

from __future__ import annotations

import numpy as np


def least_error(x: np.ndarray, weight: np.ndarray, count: int) -> float:
    """Sum of weight times squared distance to the nearest of the best `count` centres."""
    order = np.argsort(x)
    x, weight = np.float64(x[order]), np.float64(weight[order])

    def alone(a: int, b: int) -> float:
        mean = np.average(x[a:b], weights=weight[a:b])
        return float((weight[a:b] * (x[a:b] - mean) ** 2).sum())

    n = len(x)
    costs = [[alone(a, b) if a < b else np.inf for b in range(n + 1)] for a in range(n)]
    least = [0.0] + [np.inf] * n
    for _ in range(count):
        least = [0.0] + [min(least[a] + costs[a][b] for a in range(b)) for b in range(1, n + 1)]
    return least[n]
