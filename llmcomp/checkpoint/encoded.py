"""Weights in the codes that a checkpoint stores them in, for number formats that hold these as they are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from llmcomp import formats
from llmcomp.formats import Format

LEAST_RUN = 16
"""Neighbours that must share a scale: in smaller groups scales take more room than they are worth, and devices decompress them at load."""
SYMMETRIC, ASYMMETRIC = ("int2_sym", "int4_sym", "int8_sym"), ("int4_asym", "int8_asym")
"""Formats for stored integers, the smallest first. int3_sym is none of them: the CPU decompresses it at load, and int4_sym holds the same."""


@dataclass(frozen=True)
class Form:
    """A number format in which a tensor is what it is stored as, but for rounding to float32."""

    format: str
    group_size: int
    scale_type: Literal["f16", "f32"]
    """The narrowest type that holds its scales; of a format with a type of its own for them: what the chain computes in."""
    sorted: bool = False
    """Columns come in the order of their groups, which `Encoded.order` tells."""


@dataclass(frozen=True)
class Held:
    """What a tensor can be repacked into, the smallest first; why not, if nothing holds it."""

    forms: tuple[Form, ...]
    reason: str = ""


@dataclass(frozen=True)
class Lines:
    """Lines of a tensor in the codes of a form: vectors along which groups run."""

    codes: NDArray[Any]
    """[lines, weights], one code of the format per item."""
    scale: NDArray[np.float32]
    """[lines, groups]"""
    zero_point: NDArray[Any] | None = None
    """[lines, groups]"""


class Encoded(ABC):
    """A tensor that is stored quantized."""

    method: str = ""
    """What a report calls the way it is stored in."""
    crosswise: ClassVar[bool] = False
    """Lines are columns of the tensor, not rows."""

    @property
    @abstractmethod
    def held(self) -> Held:
        """Found by looking at scales and zero points, not at codes."""

    second: float = 1.0
    """What all scales of a form with two kinds of scales are multiplied by; `lines` gives the products."""

    @property
    def order(self) -> NDArray[np.int64]:
        """The columns by their groups, of a tensor that has sorted forms."""
        raise NotImplementedError

    @abstractmethod
    def lines(self, form: Form, index: int | None, start: int, stop: int) -> Lines:
        """Lines [start, stop) of the matrix, or of matrix `index` of the stack, in one of the forms of `held`."""


def held(names: Iterable[str], group_size: int, scale: NDArray[Any], is_sorted: bool = False) -> Held:
    """These formats, all with groups of this size, for a tensor of these scales."""
    wide = scale.astype(np.float32)
    return Held(tuple(Form(name, group_size, scale_type(formats.get(name), wide), is_sorted) for name in names))


def scale_type(fmt: Format, scale: NDArray[np.float32]) -> Literal["f16", "f32"]:
    """f16 where that is what the scales are, and what they are multiplied with stays within it."""
    if fmt.scale_type is not None:
        return "f32"
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = scale.astype(np.float16).astype(np.float32)
        within = (np.abs(scale) * np.float32(fmt.top) <= formats.F16_MAX).all()
    return "f16" if within and np.array_equal(narrow, scale) else "f32"


def run_length(group: NDArray[np.int64]) -> int | None:
    """The largest power of two of neighbouring columns that share a scale everywhere, given the group of each; -1 if all do, None below LEAST_RUN.

    A power of two, as devices want it: groups of 96 are three times 32.
    """
    if (group == group[0]).all():
        return -1
    size = len(group) & -len(group)
    while size >= LEAST_RUN:
        runs = group.reshape(-1, size)
        if (runs == runs[:, :1]).all():
            return size
        size //= 2
    return None


def integer_formats(low: int, high: int, zeros: NDArray[Any] | None) -> tuple[str, ...]:
    """Formats that hold integers from `low` to `high` less these zero points; none: zero."""
    least, most = (0, 0) if zeros is None else (int(zeros.min()), int(zeros.max()))
    found = []
    for name in SYMMETRIC:
        half = 1 << (formats.get(name).bits - 1)
        if least == most and -half <= low - least and high - least < half:
            found.append(name)
    for name in ASYMMETRIC:
        highest = (1 << formats.get(name).bits) - 1
        if high - low <= highest and least - low >= 0 and most - low <= highest:
            found.append(name)
    return tuple(sorted(found, key=lambda name: formats.get(name).bits))


def integer_lines(name: str, codes: NDArray[Any], low: int, scale: NDArray[Any], zeros: NDArray[Any] | None) -> Lines:
    """Integers from `low` on, less `zeros` [lines, groups] or [1, 1], in the codes of one of `integer_formats`."""
    fmt, wide = formats.get(name), np.ascontiguousarray(scale, np.float32)
    if fmt.zero_point_type is not None:
        points = np.zeros(scale.shape, np.int16) if zeros is None else np.broadcast_to(zeros, scale.shape)
        return Lines((codes.astype(np.int16) - low).astype(np.uint8), wide, (points - low).astype(np.uint8))
    zero = 0 if zeros is None else int(zeros.flat[0])
    offset = 1 << (fmt.bits - 1) if fmt.code_type.startswith("u") else 0
    return Lines((codes.astype(np.int16) + (offset - zero)).astype(np.int8), wide)
