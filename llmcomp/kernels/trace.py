"""OpenVINO's implementation of the formats' array namespace: running a rule through it builds the graph that computes the rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from llmcomp.formats import Format

CHECK = "check"
"""Name of the extra result: the sum of each group, which NaN and Inf reach."""
TYPES = {"F32": ov.Type.f32, "F16": ov.Type.f16, "BF16": ov.Type.bf16}


class Trace(NamedTuple):
    model: ov.Model
    """Grouped rows [rows, groups, size] -> the rule's results."""
    names: tuple[str, ...]
    """Names of the results, in order."""
    ranked: bool
    """The rule compares each weight with many thresholds."""


class TraceNamespace:
    """Every method adds one node. Constants are f32.

    A value per group has rank 2 here, and gets its last axis of 1 only where it meets the weights: over such an axis the plugin's kernels
    take one element at a time (measured: a third of the whole time).
    """

    ranked = False

    def min(self, x: Any) -> Any:
        return ops.reduce_min(x, ops.constant([-1]), False)

    def max(self, x: Any) -> Any:
        return ops.reduce_max(x, ops.constant([-1]), False)

    def abs(self, x: Any) -> Any:
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

    def divide(self, x: Any, y: Any) -> Any:
        node = ops.divide(*_aligned(x, y))
        # Without this mark the compiler multiplies by a reciprocal, which rounds twice.
        node.get_rt_info()["nonconvertable_divide_0"] = True
        return node

    def round(self, x: Any) -> Any:
        return ops.round(x, "half_to_even")

    def clip(self, x: Any, low: float, high: float) -> Any:
        return ops.clamp(x, low, high)

    def rank(self, x: Any, thresholds: Sequence[float]) -> Any:
        self.ranked = True
        total = None
        for threshold in thresholds:
            above = ops.select(self.less(float(threshold), x), *_aligned(1.0, 0.0))
            total = above if total is None else ops.add(total, above)
        return total

    def codes(self, x: Any, element_type: str) -> Any:
        # The plugin's Convert to bytes takes one element at a time; behind a FakeQuantize, which leaves integers as they are, it is fused.
        low, high, kind = (-128.0, 127.0, "i8") if element_type.startswith("i") else (0.0, 255.0, "u8")
        bounds = [ops.constant(np.float32(v)) for v in (low, high, low, high)]
        return ops.convert(ops.fake_quantize(x, *bounds, 256), kind)


def _aligned(*values: Any) -> list[Any]:
    """Numbers as constants, and values per group with the weights' rank if one of the others has it."""
    nodes = [ops.constant(np.float32(v)) if isinstance(v, (int, float)) else v for v in values]
    nodes = [n.output(0) if hasattr(n, "output") else n for n in nodes]
    ranks = [len(n.get_partial_shape()) for n in nodes]
    return [ops.unsqueeze(n, ops.constant([-1])) if r == 2 and max(ranks) == 3 else n for n, r in zip(nodes, ranks, strict=True)]


def trace(fmt: Format, dtype: str) -> Trace:
    """The format's rule on rows of `dtype`, a key of `TYPES`, with the extra result `CHECK`."""
    parameter = ops.parameter([-1, -1, -1], TYPES[dtype])
    wide = parameter if dtype == "F32" else ops.convert(parameter, "f32")
    xp = TraceNamespace()
    results = {**fmt.quantize(xp, wide), CHECK: ops.reduce_sum(wide, ops.constant([-1]), False)}
    model = ov.Model([ops.result(node) for node in results.values()], [parameter], f"{fmt.name}_{dtype}")
    return Trace(model, tuple(results), xp.ranked)
