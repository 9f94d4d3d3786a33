"""Data-free choice of the factors that folds move: the columns of a weight are made alike before they are quantized.

Columns of trained weights are small where their inputs are large, so a group's error, which the largest column dictates, hits the inputs
that matter most. Multiplying column j by t[j], the inverse of its typical magnitude, and dividing the input by it, balances the two: the
data-free form of AWQ (Lin et al. 2023, section 3.2, with the weight in place of the activation).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

POWER = 0.25
PRUNED = 0.25
"""Share of zeros from which on a column is taken for a pruned one; rounding to 4 bits makes fewer."""
LIMIT = 64.0
"""Most that a channel is scaled up or down, against the typical one: what is divided by t must stay within f16 where devices compute in it."""


def magnitudes(tiles: Iterable[NDArray[Any]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(sum of |w|^POWER of each column, how many of its weights count) of row tiles [R, in].

    Of a pruned column the zeros do not: the fourth root would make it, and others on its channel, look a multiple smaller than it is. Fewer
    zeros than PRUNED count as what they are, small: leaving them out loses more (SmolLM2 from a Q4_1 file: KL 0.208 for int4_sym, not 0.205).
    """
    total, count, rows = np.zeros(1), np.zeros(1), 0
    for tile in tiles:
        # The fourth root by two square roots: numpy's power takes ten times as long.
        w = _magnitude(tile)
        np.sqrt(w, out=w)
        np.sqrt(w, out=w)
        total = total + w.sum(axis=0, dtype=np.float64)
        count = count + (len(w) if w.all() else np.count_nonzero(w, axis=0))
        rows += len(tile)
    return total, np.broadcast_to(np.where(count > (1 - PRUNED) * rows, rows, count), total.shape)


def _magnitude(tile: NDArray[Any]) -> NDArray[np.float32]:
    """|w| as f32, an array of its own."""
    if tile.dtype != ml_dtypes.bfloat16:
        return np.abs(tile, dtype=np.float32)
    # bf16 is the upper half of f32, its sign the first bit: three passes fewer than a conversion.
    raw = tile.view(np.uint16).astype(np.uint32)
    raw &= 0x7FFF
    raw <<= 16
    return raw.view(np.float32)


def channel_factors(
    channels: int, readers: Sequence[tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]], free: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """t [channels]: what the readers' columns are multiplied by.

    `readers`: for each layer its columns' `magnitudes`, sums and counts, and the channel of each column. Channels that are not `free`
    and those without any weight get 1; the geometric mean of the others is 1.
    """
    total, count = np.zeros(channels), np.zeros(channels)
    for sums, counts, labels in readers:
        np.add.at(total, labels, sums)
        np.add.at(count, labels, counts)
    # A weight that is not finite is refused where it is quantized.
    live = free & (total > 0) & np.isfinite(total)
    logs = np.zeros(channels)
    logs[live] = -np.log(total[live] / count[live]) / POWER
    if live.any():
        logs[live] -= logs[live].mean()
    return np.exp(np.clip(logs, -np.log(LIMIT), np.log(LIMIT))).astype(np.float32)
