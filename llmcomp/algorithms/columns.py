"""Columns rounded one after another, each from where the rounding of those before it has left it: the inner loop of `gptq` and `refine`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.formats import NUMPY, Format

STEP = 16
"""Columns after each of which all states fall; after so many a matrix product does it for all that follow."""
RUN = 64
"""Columns that are rounded in one call: between calls Python has its turn."""

Grid = Mapping[str, NDArray[np.float32]]
"""Scale [and zero_point]."""
Run = tuple[NDArray[Any], NDArray[np.float32], NDArray[np.float32]]
"""(codes, moved, state), each like the state that was given."""
RoundColumns = Callable[[Format, NDArray[np.float32], NDArray[np.float32], NDArray[np.float32], NDArray[np.float32], Grid], Run]
"""As `round_columns`."""


def round_columns(
    fmt: Format,
    base: NDArray[np.float32],
    state: NDArray[np.float32],
    gain: NDArray[np.float32],
    coupling: NDArray[np.float32],
    grid: Grid,
) -> Run:
    """Column i gets the code nearest to base[i] + gain[i] state[i]; what this moves it by from base[i], times coupling[i, j], the state of
    each later column j falls by.

    `base` [n, rows]; `state` [n, rows] with a grid [n, rows] for each column, or [n, candidates, rows] with one [candidates, rows] for all;
    `gain` [n]; `coupling` [n, n]. Returns codes, one per item, what columns moved by, and each one's state at its turn.
    """
    codes = np.empty(state.shape, NUMPY.codes(np.zeros(1, np.float32), fmt.code_type).dtype)
    moved, state = np.empty_like(state), state.copy()
    for start in range(0, len(state), STEP):
        stop = min(start + STEP, len(state))
        for i in range(start, stop):
            own = grid if state.ndim > base.ndim else {name: values[i] for name, values in grid.items()}
            # In the order of the compiled one's operations.
            code = fmt.encode(NUMPY, base[i] + state[i] * gain[i], **own)
            codes[i] = NUMPY.codes(code, fmt.code_type)
            np.subtract(fmt.decode(NUMPY, code, **own), base[i], out=moved[i])
            if i + 1 < stop:
                state[i + 1 : stop] -= np.multiply.outer(coupling[i, i + 1 : stop], moved[i])
        if stop < len(state):
            later = coupling[start:stop, stop:].T @ moved[start:stop].reshape(stop - start, -1)
            state[stop:] -= later.reshape(state[stop:].shape)
    return codes, moved, state


def runs(count: int) -> Iterator[slice]:
    """Columns of each call: RUN, then whole STEPs, then the rest."""
    start = 0
    while start < count:
        left = count - start
        stop = start + min(RUN, left // STEP * STEP or left)
        yield slice(start, stop)
        start = stop
