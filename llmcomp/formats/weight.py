"""A compressed weight in memory, and the oracle that makes one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from llmcomp.errors import LlmcompError
from llmcomp.formats.array import EPS, F16_MAX, NUMPY
from llmcomp.formats.format import Format, grouped_shape
from llmcomp.formats.packing import pack

TILE = 1 << 22
"""Weights of a tile."""
SCALE_TOLERANCE = 2.0**-8
"""Relative error that a stored f16 scale may have: a 32nd of a step at the lowest int4 level; more than f16's normal 2^-11."""


@dataclass(frozen=True)
class CompressedWeight:
    """Codes, scale and zero point of one weight, grouped, one code per item.

    Raises:
        LlmcompError: a shape or a type does not fit the format.
    """

    format: Format
    shape: tuple[int, ...]
    group_size: int
    codes: NDArray[Any]
    scale: NDArray[Any]
    """f32 as chosen, or f16 as stored. A format that stores its scales in a type of its own always has f32 here."""
    zero_point: NDArray[Any] | None = None
    rule: str = "minmax"
    """What has chosen the scale."""

    def __post_init__(self) -> None:
        grouped = grouped_shape(self.shape, self.group_size)
        per_group = (*grouped[:-1], 1)
        wanted: dict[str, tuple[int, ...] | None] = {
            "codes": grouped,
            "scale": per_group,
            "zero_point": per_group if self.format.zero_point_type else None,
        }
        for name, shape in wanted.items():
            array = getattr(self, name)
            found = None if array is None else array.shape
            if found != shape:
                raise LlmcompError(
                    f"{name} of a {self.format.name} weight", f"its shape is {found}, not {shape}", "Group along the last axis"
                )
        if self.scale.dtype not in (np.float32, np.float16):
            raise LlmcompError(f"scale of a {self.format.name} weight", f"its type is {self.scale.dtype}", "Use float32 or float16")

    @property
    def scale_type(self) -> str:
        return "f16" if self.scale.dtype == np.float16 else "f32"

    def stored_scale(self) -> dict[str, NDArray[Any]]:
        """The scale parts as they are stored."""
        return self.format.store_scale(self.scale, self.scale_type, self.rule)

    def dequantize(self) -> NDArray[np.float32]:
        """The weight that the codes and the stored scale stand for, f32 in the weight's own shape."""
        codes = NUMPY.numbers(self.codes, self.format.code_type)
        zero_point = None if self.zero_point is None else self.zero_point.astype(np.float32)
        decoded = self.format.decode(NUMPY, codes, self.format.load_scale(self.stored_scale()), zero_point)
        return np.asarray(decoded, np.float32).reshape(self.shape)

    def stored(self, live: NDArray[np.bool_] | None = None) -> CompressedWeight:
        """The same codes with the scale in the type it is stored in; see `scale_type_needed`."""
        if self.format.scale_type or self.scale_type == "f16" or scale_type_needed(self.scale, live, self.format.top) == "f32":
            return self
        return replace(self, scale=self.scale.astype(np.float16))

    def tiles(self, weights: int = TILE) -> Iterator[tuple[slice, CompressedWeight]]:
        """A weight [out, in] by runs of rows of about so many weights: what is computed of one is small beside the whole."""
        rows, width = self.shape
        step = max(1, weights // width)
        for start in range(0, rows, step):
            run = slice(start, min(start + step, rows))
            zeros = None if self.zero_point is None else self.zero_point[run]
            shape = (run.stop - start, width)
            yield run, replace(self, shape=shape, codes=self.codes[run], scale=self.scale[run], zero_point=zeros)

    def packed(self) -> dict[str, NDArray[np.uint8]]:
        """Part name -> the bytes of the constant, 1-D, in the order of `Format.parts`."""
        arrays = {"codes": self.codes, "zero_point": self.zero_point, **self.format.fixed(), **self.stored_scale()}
        parts = self.format.parts(self.shape, self.group_size, self.scale_type)
        return {part.name: pack(np.asarray(arrays[part.name]), part.element_type) for part in parts}


def quantize(
    fmt: Format,
    w: NDArray[Any],
    group_size: int,
    rule: str = "minmax",
    scale: NDArray[np.float32] | None = None,
    zero_point: NDArray[Any] | None = None,
) -> CompressedWeight:
    """Round a weight (..., out, in) of f32, f16 or bf16 in numpy: what every kernel must equal.

    The rule picks scale and zero point, unless they are given, grouped: (..., out, groups, 1), or (..., out, 1) per channel; then it is
    only the name of what has chosen them.

    Raises:
        GroupSizeError: the group size does not divide the last axis.
        OptionError: the format has no such rule.
    """
    wide = np.asarray(w).astype(np.float32, copy=False).reshape(grouped_shape(w.shape, group_size))
    ranges = fmt.ranges(NUMPY, wide, rule) if scale is None else {"scale": scale}
    if scale is not None and zero_point is not None:
        ranges["zero_point"] = zero_point.astype(np.float32)
    codes = NUMPY.codes(fmt.encode(NUMPY, wide, **ranges), fmt.code_type)
    zeros = NUMPY.codes(ranges["zero_point"], str(fmt.zero_point_type)) if "zero_point" in ranges else None
    return CompressedWeight(fmt, tuple(w.shape), group_size, codes, ranges["scale"], zeros, rule)


def faded(w: NDArray[np.float32], scale: NDArray[np.float32], group_size: int) -> NDArray[np.bool_]:
    """[rows, groups]: groups of w [rows, in] that are not all zero and have the least scale that a rule gives, EPS, or less.

    Weights below half of it are zeros then, whatever the format.
    """
    least = np.abs(scale).reshape(len(w), -1) <= np.float32(EPS)
    if least.any():
        least &= w.reshape(grouped_shape(w.shape, group_size)).any(-1).reshape(least.shape)
    return least


def scale_type_needed(scale: NDArray[np.float32], live: NDArray[np.bool_] | None = None, top: float = 1.0) -> Literal["f16", "f32"]:
    """ "f16", or "f32" where f16 would overflow or be off by more than `SCALE_TOLERANCE` in a live group.

    `top` is `Format.top`: its product with the scale must not overflow either, nor must a table that holds it.

    `live`, of the scale's shape, is False for groups of zeros, whose scale does not matter; without it every group counts
    (a group of zeros has the scale 2^-23, which f16 holds exactly).
    """
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = scale.astype(np.float16).astype(np.float32)
        exact_enough = np.abs(narrow - scale) <= np.float32(SCALE_TOLERANCE) * np.abs(scale)
    if live is not None:
        exact_enough |= ~live & np.isfinite(narrow)
    with np.errstate(over="ignore"):
        within = top <= F16_MAX and bool((np.abs(scale) * np.float32(top) <= F16_MAX).all())
    return "f16" if within and bool(exact_enough.all()) else "f32"
