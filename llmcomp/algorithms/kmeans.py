"""Weighted k-means of numbers on a line, by histogram, with centres that f8e4m3 holds."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

COARSE = 512
"""Cells between which the exact method chooses where to cut; the steps of Lloyd's method take over from there."""
LLOYD = 25
TOP, TOPS = 4.0, 32
"""The largest magnitude of stored centres is sought in this many steps from TOP to twice as much: f8e4m3 repeats itself in every octave."""
PASSES = 4
E4M3 = np.unique(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64))
E4M3 = E4M3[np.isfinite(E4M3)]


class Sums:
    """Cells of ascending position x [n] and mass [n], as running sums of mass, mass x and mass x^2: any run of cells costs three look-ups."""

    def __init__(self, mass: NDArray[np.float64], x: NDArray[np.float64]) -> None:
        self.x = x
        self.total = np.zeros((3, len(x) + 1))
        np.cumsum([mass, mass * x, mass * x * x], axis=1, out=self.total[:, 1:])

    def split(self, count: int) -> NDArray[np.float64]:
        """Centres [count] of the best split into runs that end at every (n / COARSE)-th cell.

        Source: dynamic programming over the last cut (Wang and Song 2011, Ckmeans.1d.dp).
        """
        ends = np.unique(np.linspace(0, len(self.x), COARSE + 1).astype(np.intp))
        mass, first, second = self.total[:, None, ends] - self.total[:, ends, None]
        with np.errstate(invalid="ignore", divide="ignore"):
            cost = second - np.where(mass > 0, first * first / mass, 0)
        cost[np.tril_indices(len(ends), -1)] = np.inf
        least, cuts = cost[0], []
        for _ in range(1, count):
            whole = least[:, None] + cost
            cuts.append(whole.argmin(axis=0))
            least = whole.min(axis=0)
        at = len(ends) - 1
        edges = [at]
        for cut in reversed(cuts):
            at = int(cut[at])
            edges.append(at)
        bounds = ends[[0, *reversed(edges)]]
        middles = np.array([self.x[a : max(b, a + 1)].mean() if a < len(self.x) else self.x[-1] for a, b in itertools.pairwise(bounds)])
        return self._means(bounds, middles)

    def settled(self, centres: NDArray[np.float64]) -> NDArray[np.float64]:
        """The centres after Lloyd's steps: each becomes the mean of what is nearest to it."""
        for _ in range(LLOYD):
            moved = self._means(self._bounds(centres), centres)
            if np.array_equal(moved, centres):
                break
            centres = moved
        return centres

    def stored(self, centres: NDArray[np.float64]) -> tuple[float, ...] | None:
        """Centres times a common factor, each exact in f8e4m3, strictly ascending, or None if they would coincide."""
        largest = np.abs(centres).max()
        if not largest > 0:
            return None
        factors = TOP * 2 ** (np.arange(TOPS) / TOPS) / largest
        tried = [(self._error(E4M3[codes] / f), f, codes) for f in factors if len(set(codes := _nearest(centres * f))) == len(codes)]
        if not tried:
            return None
        error, factor, codes = min(tried, key=lambda t: t[0])
        for _ in range(PASSES):
            before = error
            for i, step in itertools.product(range(len(codes)), (-1, 1)):
                other = codes.copy()
                other[i] += step
                if not 0 <= other[i] < len(E4M3) or len(set(other)) < len(other):
                    continue
                now = self._error(E4M3[other] / factor)
                if now < error:
                    error, codes = now, other
            if error == before:
                break
        return tuple(float(v) for v in E4M3[codes])

    def _bounds(self, centres: NDArray[np.float64]) -> NDArray[np.intp]:
        inner = np.searchsorted(self.x, (centres[1:] + centres[:-1]) / 2)
        return np.concatenate([[0], inner, [len(self.x)]]).astype(np.intp)

    def _means(self, bounds: NDArray[np.intp], otherwise: NDArray[np.float64]) -> NDArray[np.float64]:
        mass, first, _ = np.diff(self.total[:, bounds], axis=1)
        return np.where(mass > 0, first / np.where(mass > 0, mass, 1), otherwise)

    def _error(self, centres: NDArray[np.float64]) -> float:
        mass, first, second = np.diff(self.total[:, self._bounds(centres)], axis=1)
        return float(np.sum(second - 2 * centres * first + centres * centres * mass))


def _nearest(values: NDArray[np.float64]) -> NDArray[np.intp]:
    """Indices into E4M3."""
    return np.searchsorted((E4M3[1:] + E4M3[:-1]) / 2, values)
