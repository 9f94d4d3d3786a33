from __future__ import annotations

from pathlib import Path

import numpy as np

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
    assert graph.unused == ["model.rotary.inv_freq"]


def test_a_constant_in_the_skeleton_is_a_layer_too(tmp_path: Path) -> None:
    """The fall-back leaves what nothing explains in skeleton.bin; its matrices are compressed from there."""
    import openvino as ov
    from openvino import opset13 as ops

    from llmcomp.graph.model import ModelGraph
    from llmcomp.graph.skeleton import Skeleton
    from tests.hand import MemoryCheckpoint

    big = np.random.default_rng(0).normal(size=(256, 128)).astype(np.float32)
    x = ops.parameter([-1, 128], ov.Type.f32, name="x")
    model = ov.Model([ops.result(ops.matmul(x, ops.constant(big), False, True, name="fused"))], [x], "m")
    ov.save_model(model, tmp_path / "skeleton.xml", compress_to_fp16=False)
    graph = ModelGraph(Skeleton(tmp_path, "t", "m", (), (), "why", False), MemoryCheckpoint({}))  # type: ignore[arg-type]
    (layer,) = graph.layers
    assert layer.dtype == "F32" and layer.shape == (256, 128) and layer.last
    assert np.array_equal(graph.rows(layer, 0, 256), big)
