"""Whether logits may be computed for a part of the vocabulary."""

from __future__ import annotations

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from llmcomp.graph.sections import _stands_alone


def behind(kind: str) -> list[ov.Input]:
    """The weight's port of a MatMul whose product is capped, or gets something for each token of the vocabulary."""
    weight = ops.parameter([32, 8], ov.Type.f32)
    product = ops.matmul(ops.parameter([-1, -1, 8], ov.Type.f32), weight, False, True)
    if kind == "capped":
        product = ops.multiply(ops.tanh(ops.divide(product, np.float32(30))), np.float32(30))
    elif kind == "biased":
        product = ops.add(product, np.ones(32, np.float32))
    elif kind == "normalized":
        product = ops.softmax(product, -1)
    elif kind == "gated":
        product = ops.multiply(product, ops.parameter([-1, -1, 32], ov.Type.f32))
    result = ops.result(product)
    assert result.get_input_size() == 1
    ports = list(weight.output(0).get_target_inputs())
    KEPT.append(result)
    return ports


KEPT: list[ov.Node] = []
"""Results hold their graph."""


@pytest.mark.parametrize(("kind", "alone"), [("plain", True), ("capped", True), ("biased", False), ("normalized", False), ("gated", False)])
def test_logits_stand_alone_if_each_is_only_changed_by_itself(kind: str, alone: bool) -> None:
    assert _stands_alone(behind(kind)) == alone
