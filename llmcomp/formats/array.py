"""The few array operations that rules are written in. Numpy is one implementation, the OpenVINO trace in `kernels` another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

EPS = float(np.finfo(np.float32).eps)
"""2^-23: the least magnitude of a scale, NNCF's guard against dividing by zero. f16 holds it exactly, as a subnormal."""


class Namespace(Protocol):
    """Elementwise f32 arithmetic and reductions over the last axis.

    Every operation rounds its f32 result once, so that all implementations agree to the bit.
    """

    def min(self, x: Any) -> Any:
        """Minimum over the last axis, which is kept with size 1."""

    def max(self, x: Any) -> Any:
        """Maximum over the last axis, which is kept with size 1."""

    def abs(self, x: Any) -> Any: ...

    def minimum(self, x: Any, y: Any) -> Any: ...

    def maximum(self, x: Any, y: Any) -> Any: ...

    def less(self, x: Any, y: Any) -> Any: ...

    def where(self, condition: Any, x: Any, y: Any) -> Any: ...

    def add(self, x: Any, y: Any) -> Any: ...

    def subtract(self, x: Any, y: Any) -> Any: ...

    def divide(self, x: Any, y: Any) -> Any:
        """x / y, correctly rounded: never x times a reciprocal."""

    def round(self, x: Any) -> Any:
        """To the nearest integer, half to even."""

    def clip(self, x: Any, low: float, high: float) -> Any: ...

    def rank(self, x: Any, thresholds: Sequence[float]) -> Any:
        """How many of the ascending thresholds lie strictly below x, as f32."""

    def codes(self, x: Any, element_type: str) -> Any:
        """Integral x as codes of an OpenVINO element type; one code per byte in numpy."""


class NumpyNamespace:
    """The oracle."""

    def min(self, x: NDArray[Any]) -> Any:
        return x.min(axis=-1, keepdims=True)

    def max(self, x: NDArray[Any]) -> Any:
        return x.max(axis=-1, keepdims=True)

    def abs(self, x: NDArray[Any]) -> Any:
        return np.abs(x)

    def minimum(self, x: Any, y: Any) -> Any:
        return np.minimum(x, y)

    def maximum(self, x: Any, y: Any) -> Any:
        return np.maximum(x, y)

    def less(self, x: Any, y: Any) -> Any:
        return np.less(x, y)

    def where(self, condition: NDArray[Any], x: Any, y: Any) -> Any:
        return np.where(condition, np.asarray(x, np.float32), np.asarray(y, np.float32))

    def add(self, x: Any, y: Any) -> Any:
        return np.add(x, y, dtype=np.float32)

    def subtract(self, x: Any, y: Any) -> Any:
        return np.subtract(x, y, dtype=np.float32)

    def divide(self, x: NDArray[Any], y: Any) -> Any:
        with np.errstate(invalid="ignore"):
            return np.divide(x, y, dtype=np.float32)

    def round(self, x: NDArray[Any]) -> Any:
        return np.rint(x)

    def clip(self, x: NDArray[Any], low: float, high: float) -> Any:
        return np.clip(x, np.float32(low), np.float32(high))

    def rank(self, x: NDArray[Any], thresholds: Sequence[float]) -> Any:
        return np.searchsorted(np.asarray(thresholds, np.float32), x).astype(np.float32)

    def codes(self, x: NDArray[Any], element_type: str) -> Any:
        with np.errstate(invalid="ignore"):  # NaN and Inf are the caller's to refuse, see kernels.non_finite
            return x.astype(np.int8 if element_type.startswith("i") else np.uint8)


NUMPY = NumpyNamespace()
