"""The few array operations that rules are written in. Numpy is one implementation, the OpenVINO trace in `kernels` another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

EPS = float(np.finfo(np.float32).eps)
"""2^-23: the least magnitude of a scale, NNCF's guard against dividing by zero. f16 holds it exactly, as a subnormal."""
F16_NORMAL, F16_MAX, F16_STEPS = 2.0**-14, 65504.0, 1024.0
"""Of f16: least normal and largest magnitude, steps between two powers of two."""


class Namespace(Protocol):
    """Elementwise f32 arithmetic and reductions over the last axis.

    Every operation rounds its f32 result once, so that all implementations agree to the bit.
    """

    def min(self, x: Any) -> Any:
        """Minimum over the last axis, which is kept with size 1."""

    def max(self, x: Any) -> Any:
        """Maximum over the last axis, which is kept with size 1."""

    def sum(self, x: Any) -> Any:
        """Sum over the last axis, which is kept with size 1: the one operation whose last bits differ between implementations."""

    def abs(self, x: Any) -> Any: ...

    def minimum(self, x: Any, y: Any) -> Any: ...

    def maximum(self, x: Any, y: Any) -> Any: ...

    def less(self, x: Any, y: Any) -> Any: ...

    def where(self, condition: Any, x: Any, y: Any) -> Any: ...

    def add(self, x: Any, y: Any) -> Any: ...

    def subtract(self, x: Any, y: Any) -> Any: ...

    def multiply(self, x: Any, y: Any) -> Any: ...

    def divide(self, x: Any, y: Any) -> Any:
        """x / y, correctly rounded: never x times a reciprocal."""

    def round(self, x: Any) -> Any:
        """To the nearest integer, half to even."""

    def clip(self, x: Any, low: float, high: float) -> Any: ...

    def rank(self, x: Any, thresholds: Sequence[float]) -> Any:
        """How many of the ascending thresholds lie strictly below x, as f32."""

    def lookup(self, table: Sequence[float], index: Any) -> Any:
        """table[index] as f32; the index is integral f32."""

    def to_f8e4m3(self, x: Any) -> Any:
        """The nearest f8e4m3 by way of f16, both half to even, as OpenVINO's Convert does it: bytes, no f32."""

    def from_f8e4m3(self, x: Any) -> Any:
        """Exact."""

    def codes(self, x: Any, element_type: str) -> Any:
        """Integral x as codes of an OpenVINO element type, one code per item in numpy; bytes of `to_f8e4m3` pass."""


_QUIET: dict[str, Any] = {"over": "ignore", "invalid": "ignore"}
"""What overflows is Inf and what that leads to NaN, as in compiled arithmetic: a search keeps the scale that it has then."""


class NumpyNamespace:
    """The oracle."""

    def min(self, x: NDArray[Any]) -> Any:
        return x.min(axis=-1, keepdims=True)

    def max(self, x: NDArray[Any]) -> Any:
        return x.max(axis=-1, keepdims=True)

    def sum(self, x: NDArray[Any]) -> Any:
        with np.errstate(**_QUIET):
            return x.sum(axis=-1, keepdims=True, dtype=np.float32)

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
        with np.errstate(**_QUIET):
            return np.add(x, y, dtype=np.float32)

    def subtract(self, x: Any, y: Any) -> Any:
        with np.errstate(**_QUIET):
            return np.subtract(x, y, dtype=np.float32)

    def multiply(self, x: Any, y: Any) -> Any:
        with np.errstate(**_QUIET):
            return np.multiply(x, y, dtype=np.float32)

    def divide(self, x: NDArray[Any], y: Any) -> Any:
        with np.errstate(**_QUIET):
            return np.divide(x, y, dtype=np.float32)

    def round(self, x: NDArray[Any]) -> Any:
        return np.rint(x)

    def clip(self, x: NDArray[Any], low: float, high: float) -> Any:
        return np.clip(x, np.float32(low), np.float32(high))

    def rank(self, x: NDArray[Any], thresholds: Sequence[float]) -> Any:
        return np.searchsorted(np.asarray(thresholds, np.float32), x).astype(np.float32)

    def lookup(self, table: Sequence[float], index: NDArray[Any]) -> Any:
        with np.errstate(invalid="ignore"):  # The index of what is no number is no number either: the scale says so.
            return np.asarray(table, np.float32).take(index.astype(np.intp), mode="clip")

    def to_f8e4m3(self, x: NDArray[Any]) -> Any:
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)

    def from_f8e4m3(self, x: NDArray[Any]) -> Any:
        return x.view(ml_dtypes.float8_e4m3fn).astype(np.float32)

    def codes(self, x: NDArray[Any], element_type: str) -> Any:
        if x.dtype == np.uint8:
            return x
        kind = np.int8 if element_type.startswith("i") else np.uint16 if element_type == "u16" else np.uint8
        with np.errstate(invalid="ignore"):  # NaN and Inf are the caller's to refuse, see kernels.non_finite
            return x.astype(kind)

    def numbers(self, codes: NDArray[Any], element_type: str) -> Any:
        """The inverse of `codes`: what `Format.decode` takes."""
        return codes if element_type.startswith("f8") else codes.astype(np.float32)


NUMPY = NumpyNamespace()


_HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
with np.errstate(over="ignore", invalid="ignore"):
    _F8_OF_F16 = _HALVES.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
_PIECE = 1 << 15


def f8e4m3_of_f16(x: NDArray[np.float16]) -> NDArray[np.uint8]:
    """The second half of `to_f8e4m3`: bytes of the nearest f8e4m3, in x's shape; x is C-contiguous."""
    raw, narrow = x.reshape(-1).view(np.uint16), np.empty(x.size, np.uint8)
    for start in range(0, raw.size, _PIECE):
        # In pieces that stay in a core's first caches. Every index is in the table; "wrap" only spares the check.
        np.take(_F8_OF_F16, raw[start : start + _PIECE], out=narrow[start : start + _PIECE], mode="wrap")
    return narrow.reshape(x.shape)


def guard(xp: Namespace, scale: Any) -> Any:
    """The scale, or EPS where its magnitude is less."""
    return xp.where(xp.less(xp.abs(scale), EPS), EPS, scale)


def floor_power(xp: Namespace, x: Any) -> Any:
    """The largest power of two not above x, for x from 2^-23 on; by comparison, since a logarithm misses powers of two."""
    power = xp.where(xp.less(x, EPS), EPS, EPS)
    # Up to 191 binades above 2^-23. What overflows is above every x.
    for step in (64, 64, 32, 16, 8, 4, 2, 1):
        raised = xp.multiply(power, float(2.0**step))
        power = xp.where(xp.less(x, raised), power, raised)
    return power


def storable(xp: Namespace, scale: Any) -> Any:
    """The scale as it is stored: the nearest f16, half to even, where that is a normal number, else as it is.

    By arithmetic: a compiler that is told to compute in f32 takes a Convert to f16 and back out of the graph.
    """
    magnitude = xp.abs(scale)
    power = floor_power(xp, magnitude)
    steps = xp.round(xp.multiply(xp.divide(scale, power), F16_STEPS))
    narrow = xp.multiply(xp.multiply(steps, 1.0 / F16_STEPS), power)
    narrow = xp.where(xp.less(magnitude, F16_NORMAL), scale, narrow)
    return xp.where(xp.less(F16_MAX, magnitude), scale, narrow)
