"""`algorithms.columns.round_columns`, compiled: fused kernels, in which numpy would spend its time between operations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from llmcomp.formats import Format
from llmcomp.formats.array import f8e4m3_of_f16
from llmcomp.kernels.cache import CACHE
from llmcomp.kernels.trace import TRACED_LEVELS, Trace, TraceNamespace

CODES, MOVED, STATE = range(3)
STEP = 16
"""Columns of an iteration, as in `algorithms.columns`."""
LEAST, MULTIPLE = 64, 256
"""Numbers of rows that are compiled for."""


@dataclass(frozen=True)
class ColumnsJob:
    """What is compiled once. Shapes are fixed: with open ones half of the time goes into finding them out anew."""

    fmt: Format
    count: int
    """Columns, STEP at most or whole STEPs."""
    candidates: int
    """Grids that are tried for all columns; 0 if each column has its own."""
    rows: int

    @property
    def short(self) -> bool:
        return True

    def trace(self) -> Trace:
        n, tail = self.count, [self.candidates, self.rows] if self.candidates else [self.rows]
        ranges = ("scale", "zero_point") if self.fmt.zero_point_type else ("scale",)
        shapes = {"base": [n, self.rows], "state": [n, *tail], "gain": [n], "coupling": [n, n]}
        inputs = _parameters(shapes | dict.fromkeys(ranges, tail if self.candidates else [n, *tail]))
        found = self._columns(inputs) if n <= STEP else self._loop(inputs, tail)
        model = ov.Model([ops.result(node) for node in found], list(inputs.values()), f"{self.fmt.name}_columns")
        kinds = [(o.get_element_type().get_type_name(), len(o.get_partial_shape())) for o in model.outputs]
        return Trace(model, tuple(inputs), dict(zip(("codes", "moved", "state"), kinds, strict=True)))

    def _loop(self, inputs: dict[str, Any], tail: list[int]) -> list[Any]:
        """STEP columns an iteration, whose movements go through one matrix product into the states of all."""
        n = self.count
        ranges = {name: inputs[name] for name in ("scale", "zero_point") if name in inputs}
        shapes = {"base": [STEP, self.rows], "gain": [STEP], "coupling": [STEP, n]}
        body = _parameters(shapes | dict.fromkeys(ranges, tail if self.candidates else [STEP, *tail]))
        states, here = ops.parameter([n, *tail], ov.Type.f32), ops.parameter([STEP], ov.Type.i32)
        own = {"state": ops.gather(states, here, ops.constant(0)), "coupling": ops.gather(body["coupling"], here, ops.constant(1))}
        found = self._columns(body | own, STEP)
        fall = ops.matmul(body["coupling"], ops.reshape(found[MOVED], ops.constant([STEP, -1]), False), True, False)
        after = ops.subtract(states, ops.reshape(fall, ops.constant([n, *tail]), False))
        step = ops.constant(np.full(STEP, STEP, np.int32))
        results = [ops.result(node) for node in (*found, after, ops.add(here, step))]
        loop = ops.tensor_iterator()
        loop.set_body(ov.Model(results, [*body.values(), states, here], "columns"))
        for name, parameter in body.items():
            if name in ranges and self.candidates:
                loop.set_invariant_input(parameter, inputs[name].output(0))
            else:
                loop.set_sliced_input(parameter, inputs[name].output(0), 0, STEP, STEP, -1, 0)
        loop.set_merged_input(states, inputs["state"].output(0), results[3].output(0))
        loop.set_merged_input(here, ops.constant(np.arange(STEP, dtype=np.int32)).output(0), results[4].output(0))
        return [loop.get_concatenated_slices(results[i].output(0), 0, STEP, STEP, -1, 0) for i in (CODES, MOVED, STATE)]

    def _columns(self, inputs: dict[str, Any], count: int | None = None) -> list[Any]:
        """All columns one after another."""
        n, xp, later = count or self.count, TraceNamespace(), inputs["state"]
        found: list[list[Any]] = [[], [], []]
        for i in range(n):
            base, gain, coupling = (_item(inputs[name], i) for name in ("base", "gain", "coupling"))
            grid = {name: inputs[name] for name in ("scale", "zero_point") if name in inputs}
            if not self.candidates:
                grid = {name: _item(values, i) for name, values in grid.items()}
            state = _item(later, 0)
            codes = self.fmt.encode(xp, ops.add(base, ops.multiply(state, gain)), **grid)
            moved = ops.subtract(self.fmt.decode(xp, codes, **grid), base)
            for own, node in zip(found, (xp.codes(codes, self.fmt.code_type), moved, state), strict=True):
                own.append(ops.unsqueeze(node, ops.constant(0)))
            if i + 1 < n:
                shape = ops.constant([-1, *[1] * (2 if self.candidates else 1)])
                fall = ops.multiply(ops.reshape(_from(coupling, i + 1, n), shape, False), ops.unsqueeze(moved, ops.constant(0)))
                later = ops.subtract(_from(later, 1, n - i), fall)
        return [ops.concat(nodes, 0) for nodes in found]


def _parameters(shapes: Mapping[str, list[int]]) -> dict[str, Any]:
    return {name: ops.parameter(shape, ov.Type.f32) for name, shape in shapes.items()}


def _item(x: Any, i: int) -> Any:
    return ops.gather(x, ops.constant(i), ops.constant(0))


def _from(x: Any, start: int, stop: int) -> Any:
    return ops.slice(x, ops.constant([start]), ops.constant([stop]), ops.constant([1]), ops.constant([0]))


def has_columns(fmt: Format) -> bool:
    """Whether compiling pays for this format, as for its rules."""
    return fmt.common and fmt.level_count <= TRACED_LEVELS


def round_columns(
    fmt: Format,
    base: NDArray[np.float32],
    state: NDArray[np.float32],
    gain: NDArray[np.float32],
    coupling: NDArray[np.float32],
    grid: Mapping[str, NDArray[np.float32]],
) -> tuple[NDArray[Any], NDArray[np.float32], NDArray[np.float32]]:
    """As `algorithms.columns.round_columns`, for formats that `has_columns`. Products and sums round once together, so that last bits differ."""
    rows, candidates = state.shape[-1], state.shape[1] if state.ndim == 3 else 0
    # What is left in the rest of a larger size does not matter.
    request, traced = CACHE.request(ColumnsJob(fmt, len(base), candidates, LEAST if rows <= LEAST else -(-rows // MULTIPLE) * MULTIPLE))
    given = {"base": base, "state": state, "gain": gain, "coupling": coupling, **grid}
    # Into tensors that the request keeps: making new ones takes as long as the computation.
    for i, name in enumerate(traced.inputs):
        request.get_input_tensor(i).data[..., : given[name].shape[-1]] = given[name]
    request.infer({}, share_inputs=True, share_outputs=True)
    results = [request.get_output_tensor(i).data[..., :rows] for i in range(len(traced.outputs))]
    codes = results[CODES]
    stored = f8e4m3_of_f16(np.ascontiguousarray(codes)) if fmt.code_type == "f8e4m3" else codes.copy()
    return stored, results[MOVED].copy(), results[STATE].copy()
