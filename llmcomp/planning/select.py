"""Choosing layers so that their share of the weights is as near to a ratio as the weights allow."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import numpy as np

BINS = 20_000
"""Most distinct totals that are told apart; beyond it sizes are rounded to 1/20000 of the whole, far below one layer."""


def nearest_subset(sizes: Sequence[int], costs: Sequence[float], ratio: float) -> list[int]:
    """Indices of the subset whose total is nearest to `ratio` of the whole; among those the one of least total cost.

    An exact 0/1 knapsack over the totals (in units of the sizes' greatest common divisor). Of two totals equally near the smaller is taken.
    NNCF instead walks the layers in order and stops at the first that does not fit, which can miss the ratio by any amount.
    """
    if not sizes or ratio <= 0:
        return []
    unit = gcd(*sizes)
    if sum(sizes) // unit > BINS:
        unit = -(-sum(sizes) // BINS)
    steps = [max(1, round(size / unit)) for size in sizes]
    total = sum(steps)
    best = np.full(total + 1, np.inf)
    best[0] = 0.0
    taken = np.zeros((len(steps), total + 1), bool)
    for i, (step, cost) in enumerate(zip(steps, costs, strict=True)):
        candidate = np.full(total + 1, np.inf)
        candidate[step:] = best[: total + 1 - step] + cost
        taken[i] = candidate < best
        best = np.where(taken[i], candidate, best)
    reachable = np.flatnonzero(np.isfinite(best))
    goal = int(reachable[np.argmin(np.abs(reachable - ratio * total))])
    chosen = []
    for i in reversed(range(len(steps))):
        if taken[i, goal]:
            chosen.append(i)
            goal -= steps[i]
    return sorted(chosen)
