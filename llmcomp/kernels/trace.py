"""OpenVINO's implementation of the formats' array namespace: running a rule through it builds the graph that computes the rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from llmcomp.formats import Format

CHECK = "check"
"""Name of the extra result: the sum of each row, which NaN and Inf reach."""
TRACED_LEVELS = 64
"""Levels of a table from which on numpy's binary search beats a comparison with each."""
TYPES = {"F32": ov.Type.f32, "F16": ov.Type.f16, "BF16": ov.Type.bf16}
Kind = Literal["quantize", "roundtrip", "error"]
Ranges = Callable[[Any, Format, Any, Any], Mapping[str, Any]]
"""(namespace, format, w, importance or None) -> scale [and zero_point] of each group."""


@dataclass(frozen=True)
class Job:
    """What is compiled once: which rule of which format on which inputs, and what of it is wanted."""

    kind: Kind
    """quantize: codes, scale and zero point, and CHECK. roundtrip: f32 weights from the codes. error: their squared error, per group."""
    fmt: Format
    dtype: str
    """A key of `TYPES`."""
    size: int
    """Weights of a group."""
    rule: str | Ranges | None
    """None: scale and zero point are inputs."""
    columns: bool = False
    """There is a factor for each input channel."""
    rows: bool = False
    """There is a factor for each output channel."""
    importance: bool = False
    """There is a weight for the squared error of each input channel."""
    ones: tuple[bool, bool, bool] = (False, False, False)
    """Which of rows, groups and size are 1. The plugin's fused kernels, compiled for any shape, keep the broadcast of an axis of 1 when the
    next tile's is longer: with one group per row first, of the next tile's groups only the first of every 16 is computed (OpenVINO 2026.4.1)."""

    @property
    def short(self) -> bool:
        return False

    def trace(self) -> Trace:
        """The graph."""
        return _trace(self)


class Trace(NamedTuple):
    model: ov.Model
    """Inputs in the order of `inputs` -> results in the order of `outputs`, a dictionary's."""
    inputs: tuple[str, ...]
    """w [rows, in]; columns [1, in]; rows [rows, 1]; importance [1, groups, size]; scale and zero_point [rows, groups]."""
    outputs: dict[str, tuple[str, int]]
    """Name -> (element type, rank): rank 3 is one for each weight, 2 for each group, 1 for each row."""


class TraceNamespace:
    """Every method adds one node. Constants are f32.

    A value per group has rank 2 here, and gets its last axis of 1 only where it meets the weights: over such an axis the plugin's kernels
    take one element at a time (measured: a third of the whole time).
    """

    def min(self, x: Any) -> Any:
        return ops.reduce_min(x, ops.constant([-1]), False)

    def max(self, x: Any) -> Any:
        return ops.reduce_max(x, ops.constant([-1]), False)

    def sum(self, x: Any) -> Any:
        return ops.reduce_sum(x, ops.constant([-1]), False)

    def abs(self, x: Any) -> Any:
        node = x.get_node() if hasattr(x, "get_node") else x
        if node.get_type_name() == "Reshape":
            # In front of the cut into groups, where rows are longer.
            return ops.reshape(ops.abs(node.input_value(0)), node.input_value(1), True)
        return ops.abs(x)

    def minimum(self, x: Any, y: Any) -> Any:
        return ops.minimum(*_aligned(x, y))

    def maximum(self, x: Any, y: Any) -> Any:
        return ops.maximum(*_aligned(x, y))

    def less(self, x: Any, y: Any) -> Any:
        return ops.less(*_aligned(x, y))

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        return ops.select(*_aligned(condition, x, y))

    def add(self, x: Any, y: Any) -> Any:
        return ops.add(*_aligned(x, y))

    def subtract(self, x: Any, y: Any) -> Any:
        return ops.subtract(*_aligned(x, y))

    def multiply(self, x: Any, y: Any) -> Any:
        return ops.multiply(*_aligned(x, y))

    def divide(self, x: Any, y: Any) -> Any:
        node = ops.divide(*_aligned(x, y))
        # Without this mark the compiler multiplies by a reciprocal, which rounds twice.
        node.get_rt_info()["nonconvertable_divide_0"] = True
        if isinstance(y, (int, float)):
            # Whatever the mark says, a Reduce (whose only reader it is) takes a division by a number into itself, as a product with the
            # reciprocal. A second reader prevents that; 0 / y is 0.
            return ops.select(ops.equal(x, ops.constant(np.float32(0))), x, node)
        return node

    def round(self, x: Any) -> Any:
        return ops.round(x, "half_to_even")

    def clip(self, x: Any, low: float, high: float) -> Any:
        return ops.clamp(x, low, high)

    def rank(self, x: Any, thresholds: Sequence[float]) -> Any:
        # A binary search: which threshold is compared next depends on the bits found so far.
        depth = len(thresholds).bit_length()
        padded = [*map(float, thresholds), *[float("inf")] * (2**depth - 1 - len(thresholds))]
        bits: list[Any] = []
        total: Any = None
        for level in range(depth):
            step = 2 ** (depth - 1 - level)
            above = self.less(self._pick(bits, padded[step - 1 :: 2 * step]), x)
            bits.append(above)
            value = ops.select(above, *_aligned(float(step), 0.0))
            total = value if total is None else ops.add(total, value)
        return total

    def _pick(self, bits: list[Any], values: Sequence[float]) -> Any:
        """The value whose number the bits spell, highest first."""
        if not bits:
            return values[0]
        half = len(values) // 2
        return ops.select(bits[0], *_aligned(self._pick(bits[1:], values[half:]), self._pick(bits[1:], values[:half])))

    def lookup(self, table: Sequence[float], index: Any) -> Any:
        return ops.gather(ops.constant(np.asarray(table, np.float32)), ops.convert(index, "i32"), ops.constant(0))

    def to_f8e4m3(self, x: Any) -> Any:
        return ops.convert(x, "f8e4m3")

    def from_f8e4m3(self, x: Any) -> Any:
        return ops.convert(x, "f32")

    def codes(self, x: Any, element_type: str) -> Any:
        if element_type.startswith("f8"):
            # Half-way only: the plugin's own Convert to f8 takes ten times as long as a table (11 ns for each weight).
            return ops.convert((x.get_node() if hasattr(x, "get_node") else x).input_value(0), "f16")
        return ops.convert(x, "i8" if element_type.startswith("i") else "u8")


def _aligned(*values: Any) -> list[Any]:
    """Numbers as constants, and values per group with the weights' rank if one of the others has it."""
    nodes = [ops.constant(np.float32(v)) if isinstance(v, (int, float)) else v for v in values]
    nodes = [n.output(0) if hasattr(n, "output") else n for n in nodes]
    ranks = [len(n.get_partial_shape()) for n in nodes]
    return [ops.unsqueeze(n, ops.constant([-1])) if r == 2 and max(ranks) == 3 else n for n, r in zip(nodes, ranks, strict=True)]


def _trace(job: Job) -> Trace:
    xp, fmt = TraceNamespace(), job.fmt
    inputs: dict[str, Any] = {"w": ops.parameter([-1, -1], TYPES[job.dtype])}
    w = inputs["w"] if job.dtype == "F32" else ops.convert(inputs["w"], "f32")
    for name, present, shape in (
        ("columns", job.columns, [1, -1]),
        ("rows", job.rows, [-1, 1]),
        ("importance", job.importance, [1, -1, -1]),
        ("scale", job.rule is None, [-1, -1]),
        ("zero_point", job.rule is None and fmt.zero_point_type, [-1, -1]),
    ):
        if present:
            inputs[name] = ops.parameter(shape, ov.Type.f32)
    for factor in ("columns", "rows"):
        if factor in inputs:
            w = xp.multiply(w, inputs[factor])
    # Only now: an elementwise kernel works row by row of the last axis, and whole channels are longer rows than groups.
    w = ops.reshape(w, ops.constant([0, -1, job.size]), True)
    importance = inputs.get("importance")
    if job.rule is None:
        ranges: dict[str, Any] = {name: inputs[name] for name in ("scale", "zero_point") if name in inputs}
    else:
        ranges = dict(fmt.ranges(xp, w, job.rule) if isinstance(job.rule, str) else job.rule(xp, fmt, w, importance))
    codes = fmt.encode(xp, w, **ranges)
    if job.kind == "quantize":
        results = {"codes": xp.codes(codes, fmt.code_type), CHECK: ops.reduce_sum(w, ops.constant([1, 2]), False)}
        if job.rule is not None:
            results["scale"] = ranges["scale"]
            if "zero_point" in ranges:
                results["zero_point"] = xp.codes(ranges["zero_point"], str(fmt.zero_point_type))
    else:
        back = fmt.decode(xp, codes, **ranges)
        difference = xp.subtract(w, back)
        squares = xp.multiply(difference, difference)
        results = {"w": back} if job.kind == "roundtrip" else {"error": xp.sum(xp.multiply(squares, importance) if importance else squares)}
    model = ov.Model([ops.result(node) for node in results.values()], list(inputs.values()), f"{fmt.name}_{job.kind}")
    kinds = [(o.get_element_type().get_type_name(), len(o.get_partial_shape())) for o in model.outputs]
    return Trace(model, tuple(inputs), dict(zip(results, kinds, strict=True)))
