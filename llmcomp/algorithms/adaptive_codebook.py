"""A table of levels fitted to the weights that will use it: one tensor's, or those of several pooled.

Scales and levels are chosen in turn, as in Lloyd's method: the scales by `search`, the levels by weighted k-means of the weights over their
scales. Both lower the same error, that of `search`: squares weighted with the inputs' second moments and a power of the magnitude.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.algorithms.kmeans import Sums
from llmcomp.algorithms.search import search
from llmcomp.errors import OptionError
from llmcomp.formats import NUMPY, Format, grouped_shape
from llmcomp.formats.codebook import CB4, make_codebook

BINS = 4096
"""Cells of the histogram."""
ROUNDS = 3
STARTS = ("search", "signed")
"""What the first scales come from. signed: every group's largest magnitude lands on the positive end, so that all groups agree on which end
is the longer; from searched scales a table stays nearly symmetric (normal weights: 12 % less error from signed, 8 % from searched ones)."""
MOST = 32
"""Levels up to which an evenly spaced table is exact in f8e4m3."""


@dataclass(frozen=True)
class Table:
    levels: tuple[float, ...]
    """Ascending, each exact in f8e4m3."""
    error: float
    """Weighted squared error of all weights, with the scales that `search` finds for these levels."""
    rivals: dict[str, float]
    """The same for "uniform" and, with sixteen levels, "cb4". One of them is returned if it is better than what was fitted."""


@dataclass(frozen=True)
class _Tensor:
    w: NDArray[np.float32]
    """[rows, groups, size]."""
    importance: NDArray[np.float32] | None
    """[1, groups, size]."""

    def weight(self, power: int) -> NDArray[np.float32]:
        weight = np.abs(self.w) ** np.float32(power)
        return weight if self.importance is None else weight * self.importance


def adaptive_codebook(
    tensors: Sequence[tuple[NDArray[Any], NDArray[Any] | None]], group_size: int, count: int = 16, rounds: int = ROUNDS
) -> Table:
    """The table of `count` levels for weights [rows, in], each with the second moments [in] of its inputs or None.

    Moments are taken relative to their tensor's mean, so that each tensor counts with its weights alone.

    Raises:
        GroupSizeError: the group size does not divide the rows.
        OptionError: fewer than 2 or more than MOST levels.
    """
    if not 2 <= count <= MOST:
        raise OptionError(f"codebook of {count} levels", f"a table is fitted for 2 to {MOST}", "Ask for 16")
    pool = [_tensor(w, moments, group_size) for w, moments in tensors]
    rivals = {"uniform": tuple(float(i - count // 2) for i in range(count))} | ({"cb4": CB4} if count == len(CB4) else {})
    errors = {name: _error(pool, levels) for name, levels in rivals.items()}
    best = min(errors, key=lambda name: errors[name])
    levels, error = rivals[best], errors[best]
    for rule in STARTS:
        current = rivals[best]
        for k in range(rounds):
            sums = Sums(*_histogram(pool, current, "search" if k else rule))
            found = sums.stored(sums.settled(sums.split(count)))
            if found is None or found == current:
                break
            current, now = found, _error(pool, found)
            if now < error:
                levels, error = current, now
    return Table(levels, error, errors)


def _tensor(w: NDArray[Any], moments: NDArray[Any] | None, group_size: int) -> _Tensor:
    size = grouped_shape(w.shape, group_size)[-1]
    wide = np.asarray(w, np.float32).reshape(len(w), -1, size)
    mean = 0.0 if moments is None else float(np.mean(moments, dtype=np.float64))
    if moments is None or mean <= 0:
        return _Tensor(wide, None)
    return _Tensor(wide, (np.asarray(moments, np.float64) / mean).astype(np.float32).reshape(1, -1, size))


def _error(pool: Sequence[_Tensor], levels: Sequence[float]) -> float:
    fmt, total = make_codebook(levels), 0.0
    for tensor in pool:
        ranges = search(NUMPY, fmt, tensor.w, tensor.importance)
        back = fmt.decode(NUMPY, fmt.encode(NUMPY, tensor.w, **ranges), **ranges)
        total += float(np.sum(np.square(tensor.w - back) * tensor.weight(fmt.search_power), dtype=np.float64))
    return total


def _histogram(pool: Sequence[_Tensor], levels: Sequence[float], rule: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(mass [BINS], mean of each cell [BINS]) of the weights over the scales that `search` or a rule finds for `levels`."""
    fmt: Format = make_codebook(levels)
    mass, moment = np.zeros(BINS), np.zeros(BINS)
    # Refitted scales may leave a group's largest weight somewhat outside of the table.
    end = 2 * max(map(abs, levels))
    for tensor in pool:
        found = search(NUMPY, fmt, tensor.w, tensor.importance) if rule == "search" else fmt.ranges(NUMPY, tensor.w, rule)
        scale = found["scale"]
        x = np.clip(NUMPY.divide(tensor.w, scale), -end, end).reshape(-1)
        weight = (tensor.weight(fmt.search_power) * np.square(scale)).reshape(-1)
        cell = np.minimum(((x + end) * (BINS / (2 * end))).astype(np.intp), BINS - 1)
        mass += np.bincount(cell, weight, BINS)
        moment += np.bincount(cell, weight.astype(np.float64) * x, BINS)
    middle = (np.arange(BINS) + 0.5) * (2 * end / BINS) - end
    return mass, np.where(mass > 0, moment / np.where(mass > 0, mass, 1), middle)
