"""A layer's second moments made ready for rounding: damped, put in visiting order, factorized once for all layers that share the input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from llmcomp.algorithms.cholesky import Each, UnitUpper, decompose, in_turn

DAMPING = 0.01
TRIES = 3
"""Cholesky factorizations that are tried, each with ten times the damping of the one before."""
BLOCK = 128
"""Columns that go through one matrix product."""

Order = Literal["activation", "group"]
"""activation: columns by descending second moment. group: groups by it, and the columns within each, so that a group's columns follow on
one another and its scale can be chosen in between."""


@dataclass(frozen=True)
class Factor:
    """H_p + diag(extra) = R diag(pivots) R^T for H's columns in visiting order p, R unit upper triangular."""

    order: NDArray[np.intp]
    """[in]: the column that is visited k-th."""
    unit: UnitUpper
    """R [in, in]."""
    pivots: NDArray[np.float32]
    """[in], positive: what a column's error still costs when all columns after it make up for it."""
    extra: NDArray[np.float32]
    """[in], in visiting order: what `padding` and damping have added to the diagonal."""
    damping: float
    """Times the mean second moment, as it was needed."""
    by_group: bool

    def columns(self, start: int, stop: int) -> NDArray[np.float32]:
        """R[:stop, start:stop]^T."""
        return self.unit.columns(start, stop)


def padding(hessian: NDArray[Any], damping: float) -> NDArray[np.float64]:
    """[in]: what to add to H's diagonal: damping times its mean, and the mean itself for dead inputs, of which nothing is known.

    Without any live input the mean counts as 1. Source: Frantar et al. 2023 (GPTQ), section 3.3; there dead weights become zero.
    """
    h = np.diagonal(hessian).astype(np.float64)
    dead = h <= 0
    mean = float(h[~dead].mean()) if not dead.all() else 1.0
    return np.where(dead, mean - h, 0.0) + damping * mean


def visiting_order(h: NDArray[Any], size: int, order: Order) -> NDArray[np.intp]:
    """Columns in the order in which they are rounded; of equal ones the first comes first."""
    if order == "activation":
        return np.argsort(-h, kind="stable")
    grouped = -np.asarray(h).reshape(-1, size)
    groups = np.argsort(grouped.sum(axis=1), kind="stable")
    return (groups[:, None] * size + np.argsort(grouped, axis=1, kind="stable")[groups]).reshape(-1)


def factorize(
    hessian: NDArray[Any], size: int, order: Order = "activation", damping: float = DAMPING, each: Each = in_turn
) -> Factor | None:
    """The factor of H [in, in] (symmetric, f32 or f64) for groups of `size` columns, or None if no damping tried makes H positive definite.

    Source: the factor of GPTQ's inverse without the inverse (Chee et al. 2023, QuIP, theorem 1: LDLQ). In f64, since in f32 small pivots beside
    large moments lose what damping gives them. `each` is how its parts are computed; where it takes threads, none of them may call this.
    """
    p = visiting_order(np.diagonal(hessian), size, order)
    for k in range(TRIES):
        strength = damping * 10.0**k
        extra = padding(hessian, strength)[p]
        found = decompose(hessian, p, extra, each)
        if found is not None:
            return Factor(p, *found, extra.astype(np.float32), strength, order == "group")
    return None


def losses(factor: Factor, delta: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Each row's (damped loss, loss) [rows] for errors [in, rows] in visiting order: tr(d (H + diag(extra)) d^T) and tr(d H d^T)."""
    damped = np.zeros(delta.shape[1], np.float32)
    for start in range(0, len(delta), BLOCK):
        stop = min(start + BLOCK, len(delta))
        seen = factor.columns(start, stop) @ delta[:stop]
        damped += factor.pivots[start:stop] @ np.square(seen)
    return damped, undamped(factor.extra, delta, damped)


def undamped(extra: NDArray[np.float32], delta: NDArray[np.float32], damped: NDArray[np.float32]) -> NDArray[np.float32]:
    """The loss that is in a damped one, without the damping's part; not below zero, where the difference is all rounding."""
    return np.maximum(damped - extra @ np.square(delta), np.float32(0))
