"""Low-rank correction of what rounding has lost, where the inputs see it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.errors import OptionError

NOISE = 1e-10
"""Of the largest squared singular value: below it, vectors computed from the Gram matrix are no longer orthogonal."""


def lora_correction(
    w: NDArray[Any], rounded: NDArray[Any], moments: NDArray[Any], rank: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(A [rank, in], B [out, rank]) with B A the best correction of its rank to `rounded` [out, in] under the inputs' second moments.

    `moments` is H [in, in], or its diagonal [in], which takes inputs for uncorrelated. Source: Zhang et al. 2024 (QERA), theorems 1 and 2:
    B A = SVD_rank(E S) S^-1, E = W - W^, S S^T = H. Since that is U U^T E, U the leading left singular vectors of E S, S is not inverted,
    and H may be singular. Each pair of vectors shares its magnitude evenly. Ranks beyond min(out, in) are zeros.

    Raises:
        OptionError: a rank below 1.
    """
    if rank < 1:
        raise OptionError(f"rank {rank}", "a correction has at least one", "Give a positive rank")
    error = np.asarray(w, np.float64) - np.asarray(rounded, np.float64)
    out, width = error.shape
    seen = error * np.sqrt(np.maximum(moments, 0)) if moments.ndim == 1 else error @ _root(moments)
    count = min(rank, out, width)
    left = _leading(seen @ seen.T, count) if out <= width else _unit(seen @ _leading(seen.T @ seen, count))
    right = left.T @ error
    share = np.sqrt(np.linalg.norm(right, axis=1))
    a, b = np.zeros((rank, width), np.float32), np.zeros((out, rank), np.float32)
    a[:count] = right / np.where(share > 0, share, 1)[:, None]
    b[:, :count] = left * share
    return a, b


def _root(hessian: NDArray[Any]) -> NDArray[np.float64]:
    """S with S S^T = H, for any H without negative directions."""
    values, vectors = np.linalg.eigh(np.asarray(hessian, np.float64))
    return vectors * np.sqrt(np.maximum(values, 0))


def _leading(gram: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Eigenvectors [n, count] of the largest eigenvalues."""
    return np.linalg.eigh(gram)[1][:, ::-1][:, :count]


def _unit(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Columns of length 1; those of next to no length become 0."""
    squares = np.square(vectors).sum(axis=0)
    some = squares > NOISE * squares.max(initial=0)
    return np.where(some, vectors / np.sqrt(np.where(some, squares, 1)), 0.0)
