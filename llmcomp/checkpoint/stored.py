"""A stored tensor as an array."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from llmcomp.checkpoint.checkpoint import TensorInfo
from llmcomp.checkpoint.mapped import map_bytes

FLOATS: dict[str, np.dtype[Any]] = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
"""Types of weights that are stored as they are."""
NUMPY = {
    **FLOATS,
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}
"""These and the types of parts of quantized weights."""


def stored_array(info: TensorInfo) -> NDArray[Any]:
    """The whole tensor, mapped and not to be written to; nothing is read before it is looked at."""
    return map_bytes(info.file, info.begin, info.end, private=False).view(NUMPY[info.dtype]).reshape(info.shape)
