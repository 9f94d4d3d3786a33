"""Choosing layers so that their share of the weights is as near to a ratio as the weights allow."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import numpy as np

BINS = 20_000
"""Most totals that are told apart. Beyond it subsets of like total share a bin, and each bin keeps its cheapest with its true total."""


def nearest_subset(sizes: Sequence[int], costs: Sequence[float], ratio: float) -> list[int]:
    """Indices of the subset whose total is nearest to `ratio` of the whole; among those the one of least total cost.

    A 0/1 knapsack over the totals in units of the sizes' greatest common divisor: exact up to BINS totals, beyond that within a few bins.
    Of two totals equally near the smaller is taken. NNCF instead walks the layers in order and stops at the first that does not fit, which
    can miss the ratio by any amount.
    """
    if not sizes or ratio <= 0:
        return []
    if ratio >= 1:
        return list(range(len(sizes)))
    unit = gcd(*sizes)
    if sum(sizes) // unit > BINS:
        unit = -(-sum(sizes) // BINS)
    steps = [max(1, round(size / unit)) for size in sizes]
    total = sum(steps)
    best = np.full(total + 1, np.inf)
    best[0] = 0.0
    true = np.zeros(total + 1, np.int64)
    # One bit for each layer and total: a mixture of experts has ten thousands of layers.
    taken = np.zeros((len(steps), total // 8 + 1), np.uint8)
    for i, (step, size, cost) in enumerate(zip(steps, sizes, costs, strict=True)):
        candidate = best[:-step] + cost
        better = candidate < best[step:]
        taken[i] = np.packbits(np.concatenate([np.zeros(step, bool), better]))
        true[step:] = np.where(better, true[:-step] + size, true[step:])
        best[step:] = np.where(better, candidate, best[step:])
    reachable = np.flatnonzero(np.isfinite(best))
    goal = int(reachable[np.argmin(np.abs(true[reachable] - ratio * sum(sizes)))])
    chosen = []
    for i in reversed(range(len(steps))):
        if taken[i, goal // 8] >> (7 - goal % 8) & 1:
            chosen.append(i)
            goal -= steps[i]
    return sorted(chosen)
