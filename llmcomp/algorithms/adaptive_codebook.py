"""A table of levels fitted to the weights that will use it: one tensor's, or those of several pooled.

Scales and levels are chosen in turn, as in Lloyd's method: the scales by `search`, the levels by weighted k-means of the weights over their
scales. Both lower the same squared error, weighted with the inputs' second moments, as `scale_estimation` has it. Where these are unknown the
scales are those of `search`, which the table will be used with, and the levels lower the plain error: weighted by the magnitude they leave
zero out (SmolLM2 with folded norms, KL 0.314 against 0.139 for CB4), and with scales of least plain error they miss the large weights (0.154);
this way 0.133. (Magnitudes beside second moments make a table that loses to CB4 once GPTQ has rounded with it.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.algorithms.kmeans import Sums
from llmcomp.algorithms.search import scale_estimation, search
from llmcomp.errors import OptionError
from llmcomp.formats import NUMPY, Format, grouped_shape
from llmcomp.formats.codebook import CB4, make_codebook

BINS = 4096
"""Cells of the histogram."""
ROUNDS = 3
ORDINARY = 1e-3, 1e6
"""Between which the largest weight may lie for scales to be clear of the least, and the squares of all weights f32."""
MOST = 32
"""Levels up to which an evenly spaced table is exact in f8e4m3."""


@dataclass(frozen=True)
class Table:
    levels: tuple[float, ...]
    """Ascending, each exact in f8e4m3."""
    error: float
    """Weighted squared error of all weights, with the scales that a search finds for these levels."""
    rivals: dict[str, float]
    """The same for "uniform" and, with sixteen levels, "cb4". One of them is returned if it is better than what was fitted."""


@dataclass(frozen=True)
class _Tensor:
    w: NDArray[np.float32]
    """[rows, groups, size]."""
    importance: NDArray[np.float32] | None
    """[1, groups, size]."""

    def weight(self, fmt: Format) -> NDArray[np.float32]:
        return np.ones((1, 1, 1), np.float32) if self.importance is None else self.importance

    def ranges(self, fmt: Format) -> Mapping[str, Any]:
        return search(NUMPY, fmt, self.w) if self.importance is None else scale_estimation(NUMPY, fmt, self.w, self.importance)


def adaptive_codebook(
    tensors: Sequence[tuple[NDArray[Any], NDArray[Any] | None]], group_size: int, count: int = 16, rounds: int = ROUNDS
) -> Table:
    """The table of `count` levels for weights [rows, in], each with the second moments [in] of its inputs or None.

    Moments are taken relative to their tensor's mean, so that each tensor counts with its weights alone. A sample of the rows will do. The
    method starts twice, from searched scales and from ones that put each group's largest magnitude on the positive end: there all groups
    agree on which end is the longer, while from searched scales a table stays nearly symmetric (normal weights: 12 and 8 % less error).

    Raises:
        GroupSizeError: the group size does not divide the rows.
        OptionError: fewer than 2 or more than MOST levels.
    """
    if not 2 <= count <= MOST:
        raise OptionError(f"codebook of {count} levels", f"a table is fitted for 2 to {MOST}", "Ask for 16")
    pool = _ordinary([_tensor(w, moments, group_size) for w, moments in tensors])
    rivals = {"uniform": tuple(float(i - count // 2) for i in range(count))} | ({"cb4": CB4} if count == len(CB4) else {})
    looks = {name: _look(pool, levels) for name, levels in rivals.items()}
    best = min(looks, key=lambda name: looks[name][0])
    levels, error = rivals[best], looks[best][0]
    for start in (looks[best], _look(pool, rivals[best], "signed")):
        current, (_, sums) = rivals[best], start
        for _ in range(rounds):
            found = sums.stored(sums.settled(sums.split(count)))
            if found is None or found == current:
                break
            now, sums = _look(pool, found)
            current = found
            if now < error:
                levels, error = found, now
    return Table(levels, error, {name: look[0] for name, look in looks.items()})


def _tensor(w: NDArray[Any], moments: NDArray[Any] | None, group_size: int) -> _Tensor:
    size = grouped_shape(w.shape, group_size)[-1]
    wide = np.asarray(w, np.float32).reshape(len(w), -1, size)
    mean = 0.0 if moments is None else float(np.mean(moments, dtype=np.float64))
    if moments is None or mean <= 0:
        return _Tensor(wide, None)
    return _Tensor(wide, (np.asarray(moments, np.float64) / mean).astype(np.float32).reshape(1, -1, size))


def _ordinary(pool: list[_Tensor]) -> list[_Tensor]:
    """The tensors times a common power of two, if their squares would not be f32 otherwise: no level depends on it."""
    largest = max(float(np.abs(tensor.w).max(initial=0)) for tensor in pool)
    if not largest or ORDINARY[0] < largest < ORDINARY[1]:
        return pool
    exponent = int(np.frexp(largest)[1])
    return [replace(tensor, w=np.ldexp(tensor.w, -exponent)) for tensor in pool]


def _look(pool: Sequence[_Tensor], levels: Sequence[float], rule: str | None = None) -> tuple[float, Sums]:
    """The weighted squared error under `levels`, and the weights over their scales, which a search chooses or a rule of the format."""
    fmt = make_codebook(levels)
    # Refitted scales may leave a group's largest weight somewhat outside of the table.
    end = 2 * max(map(abs, levels))
    error, mass, first = 0.0, np.zeros(BINS), np.zeros(BINS)
    for tensor in pool:
        ranges = tensor.ranges(fmt) if rule is None else fmt.ranges(NUMPY, tensor.w, rule)
        weight, scale = tensor.weight(fmt), ranges["scale"]
        back = fmt.decode(NUMPY, fmt.encode(NUMPY, tensor.w, **ranges), **ranges)
        error += float(np.sum(np.square(tensor.w - back) * weight, dtype=np.float64))
        x = np.clip(NUMPY.divide(tensor.w, scale), -end, end).reshape(-1)
        heavy = np.broadcast_to(weight * np.square(scale), tensor.w.shape).reshape(-1)
        cell = np.minimum(((x + end) * (BINS / (2 * end))).astype(np.intp), BINS - 1)
        mass += np.bincount(cell, heavy, BINS)
        first += np.bincount(cell, heavy.astype(np.float64) * x, BINS)
    middle = (np.arange(BINS) + 0.5) * (2 * end / BINS) - end
    return error, Sums(mass, np.where(mass > 0, first / np.where(mass > 0, mass, 1), middle))
