from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from llmcomp.graph.model import unused_tensors
from tests.hand import HIDDEN, INNER, VOCABULARY, hand_graph, weights


def test_layers_come_in_topological_order_with_their_readers(tmp_path: Path) -> None:
    graph = hand_graph(tmp_path)
    names = [layer.name for layer in graph.layers]
    blocks = [f"model.layers.{i}.{n}" for i in range(2) for n in ("up", "down", "conv")]
    assert names == ["model.embed_tokens", *blocks]
    table = graph.layers[0]
    assert table.ops == ("Gather", "MatMul") and table.nodes == ("embed", "head") and table.last and table.block is None
    assert [layer.block for layer in graph.layers[1:]] == [0, 0, 0, 1, 1, 1]
    assert not any(layer.last for layer in graph.layers[1:])
    assert graph.vocabulary == VOCABULARY
    assert graph.layers[1].shape == (INNER, HIDDEN) and not graph.layers[1].transposed


def test_rows_are_out_by_in_whatever_the_storage(tmp_path: Path) -> None:
    arrays = weights()
    graph = hand_graph(tmp_path, arrays)
    for layer in graph.layers:
        stored = arrays[layer.tensor].T if layer.name.endswith("conv") else arrays[layer.tensor]
        assert layer.transposed == layer.name.endswith("conv")
        assert np.array_equal(graph.rows(layer, 8, 24), stored[8:24])


def test_unused_tensors_are_named(tmp_path: Path) -> None:
    arrays = weights()
    hand_graph(tmp_path / "a", arrays)
    graph = hand_graph(tmp_path / "b", {**arrays, "model.rotary.inv_freq": np.zeros(4, np.float32)})
    assert unused_tensors([graph]) == ["model.rotary.inv_freq"]


def test_a_constant_in_the_skeleton_is_a_layer_too(tmp_path: Path) -> None:
    """The fall-back leaves what nothing explains in skeleton.bin; its matrices are compressed from there."""
    import openvino as ov
    from openvino import opset13 as ops

    big = np.random.default_rng(0).normal(size=(256, 128)).astype(np.float32)
    x = ops.parameter([-1, 128], ov.Type.f32, name="x")
    model = ov.Model([ops.result(ops.matmul(x, ops.constant(big), False, True, name="fused"))], [x], "m")
    graph = constant_graph(tmp_path, model)
    (layer,) = graph.layers
    assert layer.dtype == "F32" and layer.shape == (256, 128) and layer.last
    assert np.array_equal(graph.rows(layer, 0, 256), big)


def constant_graph(folder: Path, model: object) -> Any:
    """A skeleton whose weights are constants of its own, as the fall-back leaves them."""
    import openvino as ov

    from llmcomp.graph.model import ModelGraph
    from llmcomp.graph.skeleton import Skeleton
    from tests.hand import MemoryCheckpoint

    ov.save_model(model, folder / "skeleton.xml", compress_to_fp16=False)
    return ModelGraph(Skeleton(folder, "t", "m", (), (), "why", False), MemoryCheckpoint({}))  # type: ignore[arg-type]


def test_a_stack_stored_in_by_out_is_read_matrix_by_matrix(tmp_path: Path) -> None:
    """Experts as gpt-oss stores them: [experts, in, out], multiplied without transpose_b."""
    import openvino as ov
    from openvino import opset13 as ops

    stack = np.random.default_rng(0).normal(size=(5, 64, 72)).astype(np.float32)
    x = ops.parameter([5, -1, 64], ov.Type.f32, name="x")
    graph = constant_graph(tmp_path, ov.Model([ops.result(ops.matmul(x, ops.constant(stack), False, False))], [x], "m"))
    (layer,) = graph.layers
    assert layer.shape == (5, 72, 64) and layer.transposed
    rows = stack.swapaxes(1, 2).reshape(-1, 64)
    for start, stop in ((0, 360), (8, 24), (64, 88), (352, 400)):
        assert np.array_equal(graph.rows(layer, start, stop), rows[start:stop])


def test_a_computed_table_that_is_looked_up_stays_float(tmp_path: Path) -> None:
    import openvino as ov
    from openvino import opset13 as ops

    table = np.random.default_rng(0).normal(size=(512, 64)).astype(np.float32)
    ids = ops.parameter([-1], ov.Type.i64, name="ids")
    graph = constant_graph(tmp_path, ov.Model([ops.result(ops.gather(ops.constant(table), ids, ops.constant(0)))], [ids], "m"))
    assert graph.layers == ()


def test_readers_that_disagree_about_the_axes_leave_a_constant_alone(tmp_path: Path) -> None:
    import openvino as ov
    from openvino import opset13 as ops

    square = ops.constant(np.random.default_rng(0).normal(size=(160, 160)).astype(np.float32))
    x = ops.parameter([-1, 160], ov.Type.f32, name="x")
    both = ops.add(ops.matmul(x, square, False, True), ops.matmul(x, square, False, False))
    assert constant_graph(tmp_path, ov.Model([ops.result(both)], [x], "m")).layers == ()
