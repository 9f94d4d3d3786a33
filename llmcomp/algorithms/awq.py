"""Activation-aware choice of the factors that folds move (AWQ, Lin et al. 2023, section 3.2, by its quadratic form instead of replayed activations).

Multiplying column j of a weight by t[j] before rounding, and dividing its input by it, makes the error of columns with large inputs smaller
and that of the others larger. t = h^(alpha/2) / m^beta, with h the second moment of each input and m the typical magnitude of each column (as
in `equalize`; by their mean KL is a tenth larger);
(alpha, beta) is the pair on a grid whose rounding loses least under the format that will be used: each output's squared error, d H dᵀ, in
relation to its power, w H wᵀ. Without that relation the few outputs of massive power decide for all others, and KL is a fifth larger.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmcomp.algorithms.equalize import LIMIT, POWER, magnitudes
from llmcomp.formats.format import TINY

GRID = (
    *((0.0, beta) for beta in (0.0, 0.5, 0.75, 1.0)),
    *((0.125, beta) for beta in (0.5, 0.75)),
    *((0.25, beta) for beta in (0.25, 0.5, 0.75, 1.0)),
    *((0.5, beta) for beta in (0.0, 0.5)),
)
"""The first leaves the weights as they are, so that no choice is worse than that."""
SECOND_ORDER_GRID = ((0.0, 0.0), (0.0, 0.5), (0.0, 0.75), (0.125, 0.75))
"""What helps where columns make up for each other's errors, so that large inputs need less: of nine pairs these four were taken in 9 of 10 folds."""
SECOND_ORDER_GAIN = 0.05
"""Share of the loss that factors must save there: less is lost again on other text (evaluation/LOG.md)."""
SMALLEST = 1e-4
"""Least h and m, relative to their largest: channels that hardly occurred must not be scaled to nothing."""
FINALISTS = 2
"""Pairs of the grid, best by the quick quantizer, among which the one that will be used decides."""
QUIET = 1e-3
"""Least power of an output, relative to the mean of its weight, that its error is held against."""

PART = 1024
"""Columns that a quadratic form takes at a time."""

ORDINARY, MOST_BINADES = (1e-6, 1e12), 120
"""Between which the largest of a weight's differences and of its inputs' second moments may lie for their products to be f32, and the most
powers of two by which such numbers are moved there."""

Errors = Callable[[NDArray[np.float32], Sequence[NDArray[np.float32]]], Sequence[NDArray[np.float32]]]
"""(w [rows, in], several t [in]) -> for each t what w is more after rounding w * t, over t, than before."""


@dataclass(frozen=True)
class Reader:
    """A weight whose columns take the factors."""

    w: NDArray[np.float32]
    """[rows, in]: all its rows or some."""
    hessian: NDArray[np.float32]
    """[in, in]: mean of x xᵀ."""
    channels: NDArray[np.int64]
    """[in]: the channel of each column."""
    share: float
    """How many of the weight's rows one of `w` stands for."""
    errors: Errors
    """By the quantizer that will be used."""
    quick_errors: Errors | None = None
    """By one that takes less time and ranks factors almost alike."""


def choose_factors(
    count: int,
    readers: Sequence[Reader],
    free: NDArray[np.bool_],
    grid: Sequence[tuple[float, float]] = GRID,
    gain: float = 0.0,
) -> tuple[NDArray[np.float32], tuple[float, float]]:
    """t [count] and the (alpha, beta) of the grid it was made with. Channels that are not `free` get 1; the geometric mean of the others is 1.

    Where all readers have a quick quantizer it ranks the grid, FINALISTS are left for the other one. The first pair, which leaves the weights as
    they are, stays unless another saves more than `gain` of its loss.
    """
    h, m, uses, weights = (np.zeros(count) for _ in range(4))
    for reader in readers:
        np.add.at(h, reader.channels, np.diagonal(reader.hessian).astype(np.float64) * reader.share * len(reader.w))
        sums, counts = magnitudes([reader.w])
        np.add.at(m, reader.channels, sums * reader.share)
        np.add.at(weights, reader.channels, counts * reader.share)
        np.add.at(uses, reader.channels, reader.share * len(reader.w))
    live = free & (h > 0) & (m > 0)
    if not live.any():
        return np.ones(count, np.float32), grid[0]
    m = (m / np.maximum(weights, 1)) ** (1 / POWER)
    h, m = (np.maximum(x, x.max() * SMALLEST) for x in (h / np.maximum(uses, 1), m))
    worths = [reader.share * _worth(quadratic_loss(reader.w, reader.hessian)) for reader in readers]
    tried = {pair: _factors(h, m, live, *pair) for pair in grid}

    def losses(pairs: Sequence[tuple[float, float]], quick: bool) -> dict[tuple[float, float], float]:
        total = dict.fromkeys(pairs, 0.0)
        for reader, worth in zip(readers, worths, strict=True):
            errors = reader.quick_errors if quick and reader.quick_errors else reader.errors
            for pair, difference in zip(pairs, errors(reader.w, [tried[pair][reader.channels] for pair in pairs]), strict=True):
                total[pair] += float(quadratic_loss(difference, reader.hessian) @ worth)
        return total

    near = list(grid)
    if all(reader.quick_errors for reader in readers):
        ranked = losses(grid, True)
        near = sorted(grid, key=ranked.__getitem__)[:FINALISTS]
    left = losses(list({grid[0]: None, **dict.fromkeys(near)}), False)
    chosen = min(left, key=lambda pair: left[pair] * (1 - gain if pair == grid[0] else 1))
    return tried[chosen], chosen


def _factors(h: NDArray[np.float64], m: NDArray[np.float64], live: NDArray[np.bool_], alpha: float, beta: float) -> NDArray[np.float32]:
    logs = np.zeros(len(h))
    logs[live] = 0.5 * alpha * np.log(h[live]) - beta * np.log(m[live])
    logs[live] -= logs[live].mean()
    return np.exp(np.clip(logs, -np.log(LIMIT), np.log(LIMIT))).astype(np.float32)


def _worth(power: NDArray[np.float64]) -> NDArray[np.float64]:
    """[rows]: what an output's squared error counts."""
    return 1 / np.maximum(power, max(power.mean() * QUIET, TINY))


def quadratic_loss(difference: NDArray[np.float32], hessian: NDArray[np.float32]) -> NDArray[np.float64]:
    """d H dᵀ of each row d: the mean squared error of its output. H is symmetric, so what is on one side of its diagonal counts twice."""
    largest = max(float(difference.max(initial=0)), -float(difference.min(initial=0)))
    strongest = float(np.diagonal(hessian).max(initial=0))
    if largest and strongest and not (ORDINARY[0] < largest < ORDINARY[1] and ORDINARY[0] < strongest < ORDINARY[1]):
        # Their products are no f32, but those of multiples by powers of two are.
        d, h = (int(np.clip(np.frexp(x)[1], -MOST_BINADES, MOST_BINADES)) for x in (largest, strongest))
        difference = np.ldexp(difference, -d)
        return np.ldexp(_quadratic_loss(np.ldexp(difference, -h), difference, hessian), 2 * d + h)
    return _quadratic_loss(difference, difference, hessian)


def _quadratic_loss(left: NDArray[np.float32], difference: NDArray[np.float32], hessian: NDArray[np.float32]) -> NDArray[np.float64]:
    """With a multiple of the rows on the left."""
    total = np.zeros(len(difference))
    for start in range(0, len(hessian), PART):
        part = slice(start, start + PART)
        seen = left[:, part] @ hessian[part, part]
        if start:
            seen += 2 * (left[:, :start] @ hessian[:start, part])
        total += np.einsum("ij,ij->i", seen, difference[:, part])
    return total
