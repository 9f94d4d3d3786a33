"""The target of rounding on the quantized path: weights that give the float model's outputs on the inputs that have become of the data.

Of all W* minimizing the mean of |y - W* x^|^2, y the float model's output and x^ the input on the quantized path, W* = W + P (H^ + damping)^-1
with H^ the mean of x^ x^T and P that of (y - W x^) x^T. Source: Arai and Ichikawa 2025 (QEP), equations for the corrected weight; where a layer's
output is added to a residual, y here is the sum and W x^ the residual of the quantized path with it, so that the layer makes up for what the
residual has lost, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg.lapack import spotrf, spotrs

from llmcomp.algorithms.hessian import padding

STRENGTH = 0.5
"""Of the correction: all of it fits the calibration text."""
DAMPING = 0.1
"""Times the mean second moment."""


def factorized(hessian: NDArray[Any], damping: float = DAMPING) -> NDArray[np.float32] | None:
    """L [in, in], its lower triangle, with L L^T = H^ + damping, for all layers that share the input; None if there is none.

    In f32: damped so strongly H^ has a condition number of at most in / damping.
    """
    lower = np.array(hessian, np.float32)
    lower[np.diag_indices(len(lower))] += padding(hessian, damping).astype(np.float32)
    # H is symmetric, so its transpose, which LAPACK can work on in place, is H.
    lower, failed = spotrf(lower.T, lower=1, overwrite_a=1, clean=0)
    return None if failed else lower


def corrected(
    w: NDArray[np.float32], pull: NDArray[np.float32], factor: NDArray[np.float32], strength: float = STRENGTH
) -> NDArray[np.float32]:
    """w [rows, in] moved by `strength` times the way to W*, for P [rows, in] and the factor of H^. Rows of zeros, which every format keeps
    exactly, stay."""
    moved, failed = spotrs(factor, np.asfortranarray(pull.T), lower=1)
    assert not failed
    return np.asarray(w + w.any(1, keepdims=True) * np.float32(strength) * moved.T, np.float32)
