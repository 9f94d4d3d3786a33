"""Every format against its textbook twin, its packing and its decompression chain."""

from __future__ import annotations

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from llmcomp import formats
from llmcomp.errors import GroupSizeError, LlmcompError, OptionError
from llmcomp.formats import Node
from llmcomp.formats.nf4 import LEVELS
from tests.formats.inputs import CASES
from tests.reference import minmax

GROUPS = [-1, 16, 64]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", formats.names())
def test_codes_are_those_of_the_textbook(name: str, case: str) -> None:
    fmt, w = formats.get(name), CASES[case][:6]
    ours = formats.quantize(fmt, w, 64)
    for row in range(len(w)):
        for g in range(w.shape[1] // 64):
            group = w[row, 64 * g : 64 * g + 64]
            if name == "nf4":
                codes, scale = minmax.nearest_level(group, LEVELS)
            elif fmt.zero_point_type:
                codes, scale, zero = minmax.asymmetric(group, fmt.bits)
                assert ours.zero_point is not None and ours.zero_point[row, g, 0] == zero
            else:
                codes, scale = minmax.symmetric(group, fmt.bits)
            assert ours.scale[row, g, 0] == scale
            assert ours.codes[row, g].tolist() == codes


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name", formats.names())
def test_the_chain_computes_what_dequantize_computes(name: str, group: int) -> None:
    """In numpy by walking the chain, and in OpenVINO from the packed bytes."""
    fmt, w = formats.get(name), CASES["heavy tails"]
    for scale_type in ("f16", "f32"):
        weight = formats.quantize(fmt, w, group)
        weight = weight.stored() if scale_type == "f16" else weight
        assert weight.scale_type == scale_type
        packed = weight.packed()
        nodes = {}
        for part in fmt.parts(w.shape, group, scale_type):
            assert packed[part.name].nbytes == part.nbytes
            kind = getattr(ov.Type, part.element_type)
            tensor = ov.Tensor(np.ascontiguousarray(packed[part.name]), ov.Shape(list(part.shape)), kind)
            nodes[part.name] = ops.constant(tensor, shared_memory=False)
        model = ov.Model([ops.result(build(fmt.chain(w.shape, group, scale_type), nodes))], [])
        (back,) = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})([]).values()
        # With f16 scales the chain multiplies in f16: half a unit in its last place, 2^-11; NF4's table has f16 levels there as well.
        tolerance = 2.0**-10 if scale_type == "f16" else 0.0
        np.testing.assert_allclose(back, weight.dequantize(), rtol=tolerance, atol=0)


def build(node: Node, parts: dict[str, object]) -> object:
    inputs = [build(i, parts) for i in node.inputs]
    if node.op == "Part":
        return parts[str(node.attr)]
    if node.op == "Convert":
        return ops.convert(inputs[0], str(node.attr))
    if node.op == "Reshape":
        assert isinstance(node.attr, tuple)
        return ops.reshape(inputs[0], ops.constant(list(node.attr)), False)
    return {"Subtract": ops.subtract, "Multiply": ops.multiply}[node.op](*inputs)


@pytest.mark.parametrize("name", formats.names())
def test_zeros_stay_exactly_zero(name: str) -> None:
    w = CASES["zeros"]
    for group in GROUPS:
        assert not formats.quantize(formats.get(name), w, group).stored().dequantize()[w == 0].any()


@pytest.mark.parametrize("element_type", ["u4", "i4", "u8", "i8", "nf4"])
@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_packing_is_openvinos(element_type: str, count: int) -> None:
    rng = np.random.default_rng(count)
    low, high = (-8, 8) if element_type == "i4" else (-128, 128) if element_type == "i8" else (0, 256 if element_type == "u8" else 16)
    codes = rng.integers(low, high, count).astype(np.int8 if low else np.uint8)
    data = formats.pack(codes, element_type)
    assert data.nbytes == formats.packed_bytes((count,), element_type)
    assert np.array_equal(formats.unpack(data, element_type, (count,)), codes)
    kind = getattr(ov.Type, element_type)
    tensor = ov.Tensor(np.ascontiguousarray(data), ov.Shape([count]), kind)
    model = ov.Model([ops.result(ops.convert(ops.constant(tensor, shared_memory=False), "f32"))], [])
    (values,) = ov.Core().compile_model(model, "CPU")([]).values()
    # The runtime's conversion of nf4 goes through f16.
    wanted = np.float16(LEVELS)[codes] if element_type == "nf4" else codes
    np.testing.assert_allclose(values, wanted.astype(np.float32), rtol=2.0**-10 if element_type == "nf4" else 0)


def test_where_f16_cannot_hold_a_scale() -> None:
    needed = formats.scale_type_needed
    assert needed(np.float32([[0.01], [-3.0]])) == "f16"
    assert needed(np.float32([[0.01], [1e5]])) == "f32"
    assert needed(np.float32([[0.01], [3.1e-7]])) == "f32"
    assert needed(np.float32([[0.01], [3.1e-7]]), live=np.array([[True], [False]])) == "f16"
    assert needed(np.float32([[2.0**-23]])) == "f16"


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(GroupSizeError, match="192"):
        formats.quantize(formats.get("int4_sym"), CASES["normal"], 80)
    with pytest.raises(OptionError, match="int5"):
        formats.get("int5")
    with pytest.raises(LlmcompError, match="shape"):
        formats.CompressedWeight(formats.get("int8_sym"), (2, 4), -1, np.zeros((2, 4), np.int8), np.zeros((2, 2), np.float32))


@pytest.mark.parametrize("width", [1, 17, 50])
def test_odd_channels_work_per_channel(width: int) -> None:
    w = np.random.default_rng(0).normal(size=(3, width)).astype(np.float32)
    for name in formats.names():
        weight = formats.quantize(formats.get(name), w, -1)
        parts = {p.name: p for p in formats.get(name).parts(w.shape, -1, "f32")}
        assert {n: b.nbytes for n, b in weight.packed().items()} == {n: p.nbytes for n, p in parts.items()}
