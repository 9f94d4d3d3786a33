"""How much a layer suffers from low precision: NNCF's five metrics, high keeps precision.

Each is a figure of the error that int8_asym makes in the weight, times one of the inputs that it meets; the constants (2, the reciprocal) are
NNCF's. Unlike NNCF, eps is that of float32 whatever the stored type: with its float16 eps the score is the same for nearly every layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp import formats

EPS = float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Int8Error:
    """What int8_asym, one scale for each output channel, leaves of a weight W."""

    worst: float
    """Largest mean squared error of an output channel."""
    squares: float
    """Sum of squared errors."""


def int8_error(tiles: Iterable[NDArray[Any]]) -> Int8Error:
    """`tiles` are row tiles [R, in] of one weight, in any float type."""
    fmt = formats.get("int8_asym")
    worst = squares = 0.0
    for tile in tiles:
        w = np.asarray(tile).astype(np.float32, copy=False)
        errors = np.square(w - formats.quantize(fmt, w, -1).dequantize())
        worst = max(worst, float(errors.mean(axis=-1).max()))
        squares += float(errors.sum(dtype=np.float64))
    return Int8Error(worst, squares)


def weight_quantization_error(error: Int8Error) -> float:
    """1 / (largest mean squared error of an output channel + eps): it needs no data."""
    return 1.0 / (error.worst + EPS)


def hessian_input_activation(error: Int8Error, mean_square: float) -> float:
    """Frobenius norm of the error times 2 E[x^2], `mean_square` being the mean over samples of that of all inputs (HAWQ's trace)."""
    return sqrt(error.squares) * 2 * mean_square


def mean_activation_variance(error: Int8Error, mean_variance: float) -> float:
    """The data-free score times the mean over channels of the inputs' variance over a sample's tokens, averaged over samples."""
    return weight_quantization_error(error) * mean_variance


def max_activation_variance(error: Int8Error, max_variance: float) -> float:
    """As `mean_activation_variance`, with the largest variance of a channel."""
    return weight_quantization_error(error) * max_variance


def mean_activation_magnitude(error: Int8Error, magnitude: float) -> float:
    """The data-free score times the mean over channels of the largest |x| of a sample's tokens, averaged over samples."""
    return weight_quantization_error(error) * magnitude


def scores(error: Int8Error, mean_square: float, mean_variance: float, max_variance: float, magnitude: float) -> dict[str, float]:
    """All five by name."""
    return {
        "weight_quantization_error": weight_quantization_error(error),
        "hessian_input_activation": hessian_input_activation(error, mean_square),
        "mean_activation_variance": mean_activation_variance(error, mean_variance),
        "max_activation_variance": max_activation_variance(error, max_variance),
        "mean_activation_magnitude": mean_activation_magnitude(error, magnitude),
    }
