from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino as ov
import pytest

from llmcomp.graph.blocks import Cutter
from tests.hand import HIDDEN, hand_graph


def model(tmp_path: Path) -> ov.Model:
    hand_graph(tmp_path)
    return ov.Core().read_model(tmp_path / "skeleton.xml")


def test_cuts_are_where_every_path_passes(tmp_path: Path) -> None:
    names = [c.get_friendly_name() for c in Cutter(model(tmp_path)).cuts]
    assert names == ["embed", "residual0", "residual1", "norm", "head"]


def test_a_block_lies_between_the_residuals(tmp_path: Path) -> None:
    cutter = Cutter(model(tmp_path))
    bounds = cutter.bounds(["up1", "down1", "conv1"])
    assert bounds is not None and [b.get_friendly_name() for b in bounds] == ["residual0", "residual1"]
    assert cutter.bounds(["no such node"]) is None


def test_blocks_in_a_row_give_what_the_whole_gives(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    whole = model(tmp_path)
    values = {p.get_friendly_name(): p for p in whole.get_parameters() if p.get_friendly_name().startswith("llmcomp.weight")}
    data = {n: rng.normal(size=list(p.get_output_shape(0))).astype(np.float32) * 0.1 for n, p in values.items()}

    def run(cut: ov.Model, feed: dict[str, np.ndarray]) -> np.ndarray:
        compiled = ov.Core().compile_model(cut, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        inputs = []
        for parameter in cut.get_parameters():
            name = parameter.get_friendly_name()
            if name in data:
                inputs.append(ov.Tensor(to_bf16(data[name]), list(data[name].shape), ov.Type.bf16))
            else:
                inputs.append(feed[name])
        return compiled(inputs)[0]

    ids = rng.integers(0, 40, (1, 5))
    wanted = run(whole, {"input_ids": ids})
    hidden = None
    pieces = [(None, "up0"), ("up0", "up1"), ("up1", None)]
    for index, _ in enumerate(pieces):
        cutter = Cutter(model(tmp_path))
        cuts = {c.get_friendly_name(): c for c in cutter.cuts}
        start = [None, cuts["residual0"], cuts["residual1"]][index]
        end = [cuts["residual0"], cuts["residual1"], None][index]
        cut = cutter.cut(start, end)
        assert (cut.hidden is None) == (start is None)
        hidden = run(cut.model, {"input_ids": ids} if hidden is None else {"llmcomp.hidden": hidden})
        assert index == 2 or hidden.shape == (1, 5, HIDDEN)
    # The same f32 operations in the same order; the compiler may still fuse them differently at the seams.
    np.testing.assert_allclose(hidden, wanted, rtol=1e-5, atol=1e-5)


def to_bf16(array: np.ndarray) -> np.ndarray:
    import ml_dtypes

    return array.astype(ml_dtypes.bfloat16).view(np.uint16)


@pytest.mark.parametrize("name", ["embed", "residual0"])
def test_a_shape_is_not_a_hidden_value(tmp_path: Path, name: str) -> None:
    """What asks only for the shape of a hidden state does not hide a cut."""
    from openvino import opset13 as ops

    whole = model(tmp_path)
    node = next(n for n in whole.get_ops() if n.get_friendly_name() == name)
    logits = whole.get_results()[0].input_value(0).get_node()
    length = ops.convert(ops.reduce_prod(ops.shape_of(node.output(0)), ops.constant([0]), False), "f32")
    scaled = ops.multiply(logits, ops.add(ops.multiply(length, ops.constant(np.float32(0))), ops.constant(np.float32(1))), name="scaled")
    grown = ov.Model([ops.result(scaled)], whole.get_parameters(), "grown")
    assert {"embed", "residual0", "residual1"} <= {c.get_friendly_name() for c in Cutter(grown).cuts}
