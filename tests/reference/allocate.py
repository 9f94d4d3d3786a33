"""The multiple-choice knapsack by trying every choice, in exact arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import product


def least_cost(weights: Sequence[Sequence[float]], costs: Sequence[Sequence[float]], capacity: float) -> Fraction | None:
    """The least total cost of one option per unit that weighs at most `capacity`; None if nothing fits."""
    best = None
    for choice in product(*(range(len(options)) for options in weights)):
        if sum(Fraction(w[k]) for w, k in zip(weights, choice, strict=True)) <= Fraction(capacity):
            cost = sum((Fraction(c[k]) for c, k in zip(costs, choice, strict=True)), Fraction(0))
            best = cost if best is None or cost < best else best
    return best
