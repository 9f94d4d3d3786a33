"""Constants in the bodies of loops, as architectures with a scan over positions have them, keep their values wherever they come to lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from llmcomp.graph.model import ModelGraph
from llmcomp.graph.skeleton import Skeleton
from llmcomp.planning import Scheme
from llmcomp.writing.verify import check_bounds
from tests.hand import MemoryCheckpoint

ROWS, WIDTH = 4096, 8
X = np.arange(3 * WIDTH, dtype=np.float32).reshape(3, WIDTH)
RNG = np.random.default_rng(0)
A, B = RNG.normal(size=(2, 1, WIDTH)).astype(np.float32)
W = RNG.normal(size=(ROWS, WIDTH)).astype(np.float32)


def looped(folder: Path) -> ModelGraph:
    """The state goes through state * A + B + x[i], row by row, and is multiplied by a matrix, which lies before A and B in what is written."""
    x = ops.parameter([3, WIDTH], ov.Type.f32, name="x")
    state, part = ops.parameter([1, WIDTH], ov.Type.f32), ops.parameter([1, WIDTH], ov.Type.f32)
    new = ops.add(ops.add(ops.multiply(state, ops.constant(A)), ops.constant(B)), part)
    loop = ops.tensor_iterator()
    loop.set_body(ov.Model([ops.result(new)], [state, part], "body"))
    loop.set_sliced_input(part, x.output(0), 0, 1, 1, -1, 0)
    loop.set_merged_input(state, ops.constant(np.zeros((1, WIDTH), np.float32)).output(0), new.output(0))
    product = ops.matmul(loop.get_iter_value(new.output(0), -1), ops.constant(W), False, True)
    ov.save_model(ov.Model([ops.result(product)], [x], "looped"), folder / "skeleton.xml", compress_to_fp16=False)
    return ModelGraph(Skeleton(folder, "t", "m", (), (), None, False), MemoryCheckpoint({}))  # type: ignore[arg-type]


def test_they_move_with_everything_else(tmp_path: Path, write: Callable[..., Any]) -> None:
    graph = looped(tmp_path)
    assert len(list(graph.ir.body_constants())) == 2 and len(graph.layers) == 1
    before = {int(graph.ir.data(number)["offset"]) for number in graph.ir.body_constants()}
    written = write(graph, tmp_path / "out", Scheme("int8_asym", -1))
    assert before != {written.layout.constants[number][0] for number in graph.ir.body_constants()}
    check_bounds(written.xml)
    state = np.zeros((1, WIDTH), np.float32)
    for row in X:
        state = state * A + B + row
    wanted = state @ W.T
    (found,) = ov.compile_model(written.xml, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})([X]).values()
    # Each weight is off by half a step of its row's range at most.
    bound = np.abs(state).sum() * (W.max(1) - W.min(1)).max() / 255
    assert np.abs(found - wanted).max() <= bound
