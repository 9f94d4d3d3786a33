"""What a number format is, and the registry of them.

Shapes: a weight is (..., out, in) with groups along the last axis; grouped arrays are (..., out, groups, size).
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.errors import GroupSizeError, OptionError
from llmcomp.formats.array import Namespace
from llmcomp.formats.packing import packed_bytes


@dataclass(frozen=True)
class Part:
    """One stored constant of a compressed weight."""

    name: str
    """"codes", "zero_point" or "scale"."""
    element_type: str
    """OpenVINO's spelling."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return packed_bytes(self.shape, self.element_type)


@dataclass(frozen=True)
class Node:
    """One operation of a decompression chain, as data."""

    op: str
    """"Part", "Convert", "Subtract", "Multiply" or "Reshape"."""
    inputs: tuple[Node, ...] = ()
    attr: str | tuple[int, ...] | None = None
    """Part: its name. Convert: the element type. Reshape: the target shape."""


def grouped_shape(shape: tuple[int, ...], group_size: int) -> tuple[int, ...]:
    """Shape of the codes: `shape` itself per channel (-1), else the last axis cut into groups.

    Raises:
        GroupSizeError: the size is neither -1 nor positive, or does not divide the last axis.
    """
    if group_size == -1:
        return tuple(shape)
    if group_size < 1 or shape[-1] % group_size:
        raise GroupSizeError(
            f"group size {group_size}",
            f"it does not divide a channel of {shape[-1]} weights",
            "Use a divisor, or -1 for one group per channel",
        )
    return (*shape[:-1], shape[-1] // group_size, group_size)


@dataclass(frozen=True)
class Format(ABC):
    """A number format. Instances are immutable and live in the registry."""

    name: str
    """NNCF's value of CompressWeightsMode."""
    bits: int
    code_type: str
    """Element type of the codes."""
    for_embeddings: bool
    """A Gather can read the table compressed."""
    grouped: bool
    """Groups by default; every format takes any group size, and -1 for one group per channel."""
    zero_point_type: str | None = None

    def parts(self, shape: tuple[int, ...], group_size: int, scale_type: str = "f16") -> tuple[Part, ...]:
        """The stored constants of a weight, in file order."""
        codes = grouped_shape(shape, group_size)
        per_group = (*codes[:-1], 1)
        middle = (Part("zero_point", self.zero_point_type, per_group),) if self.zero_point_type else ()
        return (Part("codes", self.code_type, codes), *middle, Part("scale", scale_type, per_group))

    def chain(self, shape: tuple[int, ...], group_size: int, scale_type: str = "f16", to: str = "f32") -> Node:
        """The operations that give the weight back, in the form that plugins run compressed; arithmetic is in the scale's type."""
        node = Node("Convert", (Node("Part", attr="codes"),), scale_type)
        if self.zero_point_type:
            node = Node("Subtract", (node, Node("Convert", (Node("Part", attr="zero_point"),), scale_type)))
        node = Node("Multiply", (node, Node("Part", attr="scale")))
        if grouped_shape(shape, group_size) != tuple(shape):
            node = Node("Reshape", (node,), tuple(shape))
        return node if to == scale_type else Node("Convert", (node,), to)

    @abstractmethod
    def quantize(self, xp: Namespace, w: Any) -> dict[str, Any]:
        """The rule `minmax`: f32 w, one group per row of the last axis -> codes, f32 scale, and zero_point if the format has one.

        Codes are chosen with the f32 scale. Source: NNCF 3.4.0, which it equals to the bit.
        """

    @abstractmethod
    def dequantize(self, parts: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        """Codes, scale [and zero_point], one code per item, grouped -> f32 of the codes' shape, computed in f32."""


_REGISTRY: dict[str, Format] = {}


def register(*formats: Format) -> None:
    """Make formats known under their names.

    Raises:
        OptionError: a name is taken.
    """
    for fmt in formats:
        if fmt.name in _REGISTRY:
            raise OptionError(f"format {fmt.name!r}", "two formats have this name", "Rename one")
        _REGISTRY[fmt.name] = fmt


@cache
def _discover() -> None:
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"{__package__}.{module.name}")


def names() -> tuple[str, ...]:
    """Names of all formats."""
    _discover()
    return tuple(_REGISTRY)


def exists(name: str) -> bool:
    """Whether a format has this name."""
    return name in names()


def get(name: str) -> Format:
    """The format of this name.

    Raises:
        OptionError: there is none.
    """
    if not exists(name):
        raise OptionError(f"format {name!r}", "no such number format", f"Use one of {', '.join(names())}")
    return _REGISTRY[name]
