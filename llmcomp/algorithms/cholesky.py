"""A = R diag(pivots) R^T with R unit upper triangular, of a large A: in panels, so that memory holds one triangle, and every core has work.

LAPACK does it in one call, but on one core while our own threads are in use, and in the place of a whole f64 matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg.lapack import dpotrf, dtrtri

PANEL = 512
"""Columns that are eliminated together: the more, the fewer passes over what is left; the fewer, the less is done by one core alone."""

Each = Callable[[Callable[[Any], Any], Iterable[Any]], Sequence[Any]]
"""A function's results for all items, on several threads or not."""


def in_turn(function: Callable[[Any], Any], items: Iterable[Any]) -> Sequence[Any]:
    return [function(item) for item in items]


@dataclass(frozen=True)
class UnitUpper:
    """R [in, in], unit upper triangular, without what is below its diagonal."""

    panels: tuple[NDArray[np.float32], ...]
    """R[:stop, start:stop]^T for each PANEL of columns, the last one as wide as is left."""

    def columns(self, start: int, stop: int) -> NDArray[np.float32]:
        """R[:stop, start:stop]^T, in place where one panel has it all."""
        first, last = start // PANEL, (stop - 1) // PANEL
        if first == last:
            return self.panels[first][start - first * PANEL : stop - first * PANEL, :stop]
        found = np.zeros((stop - start, stop), np.float32)
        for i in range(first, last + 1):
            own = self.panels[i][max(0, start - i * PANEL) : stop - i * PANEL, :stop]
            at = max(start, i * PANEL) - start
            found[at : at + len(own), : own.shape[1]] = own
        return found


def decompose(
    matrix: NDArray[Any], order: NDArray[np.intp], extra: NDArray[np.float64], each: Each = in_turn
) -> tuple[UnitUpper, NDArray[np.float32]] | None:
    """(R, pivots) of the symmetric matrix [in, in] with rows and columns in this order and `extra` on its diagonal then; None: not positive
    definite.

    In f64 and to f32 at last. At its height it holds half a matrix in f64.
    """
    width = len(order)
    parts = [slice(start, min(start + PANEL, width)) for start in range(0, width, PANEL)]

    def left(part: slice) -> NDArray[np.float64]:
        """A[:stop, part]^T, of which what is above A's diagonal counts."""
        panel = np.empty((part.stop - part.start, part.stop), np.float64)
        rows = order[part]
        for start in range(0, len(rows), PANEL // 8):
            here = slice(start, start + PANEL // 8)
            panel[here] = matrix[rows[here]][:, order[: part.stop]]
        panel[np.arange(len(rows)), np.arange(part.start, part.stop)] += extra[part]
        return panel

    panels = list(each(left, parts))
    units: list[NDArray[np.float32]] = []
    pivots = np.empty(width, np.float32)
    for part in reversed(parts):
        panel, before = panels.pop(), parts[: len(panels)]
        root = _upper_root(panel[:, part])
        if root is None:
            return None
        upper, inverse = root

        def solve(columns: slice, panel: NDArray[np.float64] = panel, inverse: NDArray[np.float64] = inverse) -> None:
            panel[:, columns] = inverse @ panel[:, columns]

        def eliminate(pair: tuple[int, int], panel: NDArray[np.float64] = panel) -> None:
            of, columns = pair[0], parts[pair[1]]
            panels[of][:, columns] -= panel[:, parts[of]].T @ panel[:, columns]

        each(solve, before)
        each(eliminate, [(i, k) for i, k in product(range(len(before)), repeat=2) if k <= i])
        roots = np.diagonal(upper)
        pivots[part] = np.square(roots)
        panel[:, part] = upper.T
        panel /= roots[:, None]
        units.append(panel.astype(np.float32))
    return UnitUpper(tuple(units[::-1])), pivots


def _upper_root(a: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """U upper triangular with U U^T = a, and its inverse; None if there is none.

    LAPACK's root is L L^T: U is that of a reversed, reversed. By the inverse all columns above are solved for in plain products.
    """
    lower, failed = dpotrf(a[::-1, ::-1], lower=1, clean=1)
    roots = np.diagonal(lower)
    if failed or not np.isfinite(roots).all() or not (roots > 0).all():
        return None
    inverse, failed = dtrtri(lower, lower=1)
    return None if failed else (lower[::-1, ::-1], np.ascontiguousarray(inverse[::-1, ::-1]))
