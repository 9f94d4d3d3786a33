"""What a number format is, and the registry of them.

Shapes: a weight is (..., out, in) with groups along the last axis; grouped arrays are (..., out, groups, size).
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from llmcomp.errors import GroupSizeError, OptionError
from llmcomp.formats.array import NUMPY, Namespace, guard
from llmcomp.formats.packing import packed_bytes

TINY = 1e-30
"""A sum of squares from which on dividing by it is safe."""
BEYOND = 1e38
"""A weight that a scale of one cuts to the last level, whatever the format."""


@dataclass(frozen=True)
class Part:
    """One stored constant of a compressed weight."""

    name: str
    """"codes", "zero_point", "scale", "second_order_scale" or "codebook"."""
    element_type: str
    """OpenVINO's spelling."""
    shape: tuple[int, ...]
    role: Literal["rows", "scale", "fixed"] = "rows"
    """rows: known with the rows that it belongs to. scale: when all scales of the weight are known. fixed: the same for every weight."""

    @property
    def nbytes(self) -> int:
        return packed_bytes(self.shape, self.element_type)


@dataclass(frozen=True)
class Node:
    """One operation of a decompression chain, as data."""

    op: str
    """"Part", "Convert", "Gather" (table, indices), "Subtract", "Multiply" or "Reshape"."""
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
    """A number format: its parts, its grid, the rules that pick its scales, and the rounding. Instances are immutable.

    Arithmetic is written against a `Namespace`, on f32 with one group per row of the last axis.
    """

    name: str
    """NNCF's value of CompressWeightsMode."""
    bits: int
    code_type: str
    """Element type of the codes."""
    for_embeddings: bool = False
    """A Gather can read the table compressed."""
    group_size: int = 64
    """The size that groups have by default; -1 is one group per channel."""
    fixed_group: bool = False
    """No other size exists."""
    zero_point_type: str | None = None
    scale_type: str | None = None
    """The type that scales are stored in; None: f16, and f32 where f16 cannot hold them."""
    rules: tuple[str, ...] = ("minmax",)
    """Names of the rules that pick scales, rivals in the field included; the first is NNCF's."""
    search_factors: tuple[float, ...] = (1.0, 0.94, 0.87, 0.79)
    """What a search multiplies the scale of `minmax` by; negative ones turn the grid around."""
    common: bool = True
    """Whether many weights have it, so that compiling its rounding pays."""
    search_power: int = 1
    """In a search the squared error of a weight counts with its magnitude to this power."""
    best_rule: str = "minmax"
    """The one that is used unless another is asked for: of those that cost nothing, the one of least KL on real text."""

    @abstractmethod
    def ranges(self, xp: Namespace, w: Any, rule: str = "minmax") -> dict[str, Any]:
        """Scale [and zero_point] of each group, f32, last axis 1. `minmax` equals NNCF 3.4.0 to the bit.

        Raises:
            OptionError: the format has no such rule.
        """

    @abstractmethod
    def encode(self, xp: Namespace, w: Any, scale: Any, zero_point: Any = None) -> Any:
        """Nearest codes under this scale, integral f32 (`to_f8e4m3` bytes for f8)."""

    @abstractmethod
    def decode(self, xp: Namespace, codes: Any, scale: Any, zero_point: Any = None) -> Any:
        """What the codes stand for, f32."""

    def candidates(self, xp: Namespace, w: Any, weight: Any) -> Iterator[dict[str, Any]]:
        """Scales [and zero points] worth trying, `minmax` first. `weight` is of each squared error, in w's shape."""
        ranges = self.ranges(xp, w)
        yield ranges
        for factor in self.search_factors:
            yield self.refit(xp, w, weight, {**ranges, "scale": xp.multiply(ranges["scale"], factor)})

    def refit(self, xp: Namespace, w: Any, weight: Any, ranges: dict[str, Any]) -> dict[str, Any]:
        """The ranges with the scale of least weighted squared error for the codes that they give.

        Source: least squares in one unknown, sum(weight w q) / sum(weight q q); the scale is kept where all codes stand for zero.
        """
        levels = self.decode(xp, self.encode(xp, w, **ranges), **{**ranges, "scale": 1.0})
        weighted = xp.multiply(weight, levels)
        square, product = xp.sum(xp.multiply(weighted, levels)), xp.sum(xp.multiply(weighted, w))
        some = xp.less(TINY, square)
        best = xp.divide(product, xp.where(some, square, 1.0))
        return {**ranges, "scale": guard(xp, xp.where(some, best, ranges["scale"]))}

    @cached_property
    def top(self) -> float:
        """The largest magnitude that a scale is multiplied with."""
        beyond, nothing = np.array([[-BEYOND], [BEYOND]], np.float32), np.float32(0)
        zero_point = {"zero_point": nothing} if self.zero_point_type else {}
        levels = self.decode(NUMPY, self.encode(NUMPY, beyond, np.float32(1), **zero_point), np.float32(1), **zero_point)
        return float(np.abs(levels).max())

    @property
    def level_count(self) -> int:
        """Levels that a weight is compared with one by one, 0 if it is rounded."""
        return 0

    def check_rule(self, rule: str) -> str:
        """`rule` if the format has it.

        Raises:
            OptionError: it has not.
        """
        if rule not in self.rules:
            raise OptionError(f"rule {rule!r}", f"{self.name} has no such rule", f"Use one of {', '.join(self.rules)}")
        return rule

    def parts(self, shape: tuple[int, ...], group_size: int, scale_type: str = "f16") -> tuple[Part, ...]:
        """The stored constants of a weight, in file order. `scale_type` is the type that the chain computes in."""
        codes = grouped_shape(shape, group_size)
        per_group = (*codes[:-1], 1)
        middle = (Part("zero_point", self.zero_point_type, per_group),) if self.zero_point_type else ()
        return (Part("codes", self.code_type, codes), *middle, Part("scale", self.scale_type or scale_type, per_group, "scale"))

    def chain(self, shape: tuple[int, ...], group_size: int, scale_type: str = "f16", to: str = "f32") -> Node:
        """The operations that give the weight back, in the form that plugins run compressed; arithmetic is in `scale_type`."""
        node = Node("Multiply", (self.levels(scale_type), self.scale_node(scale_type)))
        if grouped_shape(shape, group_size) != tuple(shape):
            node = Node("Reshape", (node,), tuple(shape))
        return node if to == scale_type else Node("Convert", (node,), to)

    def levels(self, scale_type: str) -> Node:
        """What the scale is multiplied with."""
        return Node("Convert", (Node("Part", attr="codes"),), scale_type)

    def scale_node(self, scale_type: str) -> Node:
        """The scale in `scale_type`."""
        part = Node("Part", attr="scale")
        return part if self.scale_type is None else Node("Convert", (part,), scale_type)

    def fixed(self) -> Mapping[str, NDArray[Any]]:
        """Contents of the fixed parts, one code per item."""
        return {}

    def store_scale(self, scale: NDArray[np.float32], scale_type: str, rule: str = "minmax") -> dict[str, NDArray[Any]]:
        """All scales of a weight, as `rule` has chosen them -> the scale parts as they are stored."""
        return {"scale": scale.astype(np.float16) if scale_type == "f16" else scale}

    def load_scale(self, parts: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        """The inverse: what the stored scale parts stand for."""
        return parts["scale"].astype(np.float32)


def largest(xp: Namespace, w: Any, rule: str) -> Any:
    """The largest magnitude of each group, with the sign of its weight if the rule is "signed" (of two equal ones the negative)."""
    if rule != "signed":
        return xp.max(xp.abs(w))
    low, high = xp.min(w), xp.max(w)
    return xp.where(xp.less(xp.abs(low), high), high, low)


_REGISTRY: dict[str, Format] = {}
_FAMILIES: dict[str, Callable[[str], Format]] = {}


def register(*formats: Format) -> None:
    """Make formats known under their names.

    Raises:
        OptionError: a name is taken.
    """
    for fmt in formats:
        if fmt.name in _REGISTRY:
            raise OptionError(f"format {fmt.name!r}", "two formats have this name", "Rename one")
        _REGISTRY[fmt.name] = fmt


def register_family(name: str, make: Callable[[str], Format]) -> None:
    """Make known all formats written `name[...]`; `make` gets what stands in the brackets and raises OptionError for nonsense."""
    _FAMILIES[name] = make


@cache
def _discover() -> None:
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"{__package__}.{module.name}")


def names() -> tuple[str, ...]:
    """Names of all formats; families, which take an argument, are not among them."""
    _discover()
    return tuple(_REGISTRY)


def exists(name: str) -> bool:
    """Whether a format has this name.

    Raises:
        OptionError: the name is a family's, but not its argument.
    """
    return name in names() or _member(name) is not None


def get(name: str) -> Format:
    """The format of this name.

    Raises:
        OptionError: there is none.
    """
    fmt = _REGISTRY.get(name) if name in names() else _member(name)
    if fmt is None:
        raise OptionError(
            f"format {name!r}", "no such number format", f"Use one of {', '.join((*names(), *(f'{f}[...]' for f in _FAMILIES)))}"
        )
    return fmt


@cache
def _member(name: str) -> Format | None:
    family, bracket, argument = name.partition("[")
    if not bracket or not argument.endswith("]") or family not in _FAMILIES:
        return None
    return _FAMILIES[family](argument[:-1])
