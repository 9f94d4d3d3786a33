"""How much a layer suffers from low precision, without data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp import formats

EPS = float(np.finfo(np.float32).eps)


def weight_quantization_error(tiles: Iterable[NDArray[Any]]) -> float:
    """NNCF's data-free score, 1 / (max over output channels of the mean squared int8_asym error + eps); high keeps precision.

    `tiles` are row tiles [R, in] of one weight, in any float type. Unlike NNCF, eps is that of float32 whatever the stored type: with its
    float16 eps the score is the same for nearly every layer.
    """
    fmt = formats.get("int8_asym")
    worst = 0.0
    for tile in tiles:
        w = np.asarray(tile).astype(np.float32, copy=False)
        back = formats.quantize(fmt, w, -1).dequantize()
        worst = max(worst, float(np.square(w - back).mean(axis=-1).max()))
    return 1.0 / (worst + EPS)
