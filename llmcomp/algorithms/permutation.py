"""Which order the columns of a weight are best in, where the order is free.

A group shares one scale, so it should hold weights of one size. Channels sorted by magnitude do (as in RPTQ, Yuan et al. 2023, for activations);
of a transformer's MLP the inner ones may take any order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray


def falling_order(tiles: Iterable[NDArray[Any]]) -> NDArray[np.int64]:
    """[in]: the column that comes first, second and so on, by the mean of |w| over the rows of all tiles [R, in], falling; equal ones as they were."""
    total = np.zeros(1)
    for tile in tiles:
        total = total + np.abs(tile, dtype=np.float32).sum(axis=0, dtype=np.float64)
    return np.argsort(-total, kind="stable")
