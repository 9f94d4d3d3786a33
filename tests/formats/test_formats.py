"""Every format against its textbook twin, its packing and its decompression chain."""

from __future__ import annotations

import re

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from llmcomp import formats
from llmcomp.errors import GroupSizeError, LlmcompError, OptionError
from llmcomp.formats import Node
from tests.formats.inputs import CASES
from tests.reference import minmax

GROUPS = [-1, 16, 64]
CODEBOOKS = [
    "codebook[-1,0,1]",
    "codebook[0,1]",
    f"codebook[{','.join(str(x / 8) for x in range(-100, 100))}]",
    f"codebook[{','.join(str(x / 7) for x in range(-11, 7))}]",
    f"codebook[{','.join(str(x) for x in range(-200, 200))}]",
]
"""Ternary, without a negative level, 200 levels that f16 holds, levels that only f32 holds, 400 levels in u16."""


def sizes(name: str) -> list[int]:
    """Group sizes to try: a format with one size of its own has no other."""
    fmt = formats.get(name)
    return [fmt.group_size] if fmt.fixed_group else GROUPS


def textbook(name: str, w: np.ndarray, rule: str) -> tuple[np.ndarray, ...]:
    """(codes, scales[, zero points]) of groups [n, size]."""
    fmt = formats.get(name)
    if name.startswith("int"):
        if fmt.zero_point_type:
            return minmax.asymmetric(w, fmt.bits)
        codes, scale = minmax.symmetric(w, fmt.bits, rule)
        return (codes if fmt.bits in (4, 8) else codes + 2 ** (fmt.bits - 1)), scale
    if name == "nf4" or fmt.level_count:
        return minmax.nearest_level(w, minmax.QLORA if name == "nf4" else np.array(fmt.table), rule)  # type: ignore[attr-defined]
    element = minmax.E4M3 if fmt.code_type == "f8e4m3" else minmax.E2M1
    scale = minmax.power_scale(w, element, rule) if name.startswith("mx") else minmax.float_scale(w, element)
    return minmax.nearest_float(w, scale, element), scale


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [*formats.names(), *CODEBOOKS])
def test_codes_are_those_of_the_textbook(name: str, case: str) -> None:
    fmt, w = formats.get(name), CASES[case]
    for rule in fmt.rules:
        for group in sizes(name):
            ours = formats.quantize(fmt, w, group, rule)
            size = w.shape[1] if group == -1 else group
            codes, scale, *zero = textbook(name, w.reshape(-1, size), rule)
            assert np.array_equal(ours.scale.reshape(-1), scale.astype(np.float32)), rule
            assert np.array_equal(ours.codes.reshape(-1, size), codes), rule
            if zero:
                assert ours.zero_point is not None and np.array_equal(ours.zero_point.reshape(-1), zero[0])


@pytest.mark.parametrize("name", [*formats.names(), *CODEBOOKS])
def test_an_unknown_rule_is_refused(name: str) -> None:
    for rule in ("", "floors", "signed" if name.startswith("mx") else "floor"):
        with pytest.raises(OptionError, match=re.escape(repr(rule))):
            formats.quantize(formats.get(name), CASES["normal"], -1, rule)


@pytest.mark.parametrize(("name", "group"), [(n, g) for n in (*formats.names(), *CODEBOOKS) for g in sizes(n)])
def test_the_chain_computes_what_dequantize_computes(name: str, group: int) -> None:
    """In OpenVINO from the packed bytes."""
    fmt, w = formats.get(name), CASES["heavy tails"]
    for scale_type in ("f16", "f32"):
        weight = formats.quantize(fmt, w, group)
        weight = weight.stored() if scale_type == "f16" else weight
        # Scales of a type of their own are f32 until they are stored, whatever the chain computes in.
        assert weight.scale_type == ("f32" if fmt.scale_type else scale_type)
        back = evaluate(weight, scale_type)
        # With f16 scales the chain multiplies in f16: half a unit in its last place, 2^-11; levels of a table, and NVFP4's scales, become
        # f16 there as well.
        tolerance = 2.0**-10 if scale_type == "f16" else 0.0
        np.testing.assert_allclose(back, weight.dequantize(), rtol=tolerance, atol=0)


def evaluate(weight: formats.CompressedWeight, scale_type: str) -> np.ndarray:
    """What OpenVINO makes of the stored bytes by the format's chain."""
    fmt, packed, nodes = weight.format, weight.packed(), {}
    for part in fmt.parts(weight.shape, weight.group_size, scale_type):
        assert packed[part.name].nbytes == part.nbytes
        tensor = ov.Tensor(np.ascontiguousarray(packed[part.name]), ov.Shape(list(part.shape)), getattr(ov.Type, part.element_type))
        nodes[part.name] = ops.constant(tensor, shared_memory=False)
    model = ov.Model([ops.result(build(fmt.chain(weight.shape, weight.group_size, scale_type), nodes))], [])
    (back,) = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})([]).values()
    return back


def build(node: Node, parts: dict[str, object]) -> object:
    inputs = [build(i, parts) for i in node.inputs]
    if node.op == "Part":
        return parts[str(node.attr)]
    if node.op == "Convert":
        return ops.convert(inputs[0], str(node.attr))
    if node.op == "Reshape":
        assert isinstance(node.attr, tuple)
        return ops.reshape(inputs[0], ops.constant(list(node.attr)), False)
    if node.op == "Gather":
        return ops.gather(*inputs, ops.constant(0))
    return {"Subtract": ops.subtract, "Multiply": ops.multiply}[node.op](*inputs)


@pytest.mark.parametrize("name", formats.names())
def test_zeros_stay_exactly_zero(name: str) -> None:
    w = CASES["zeros"]
    for group in sizes(name):
        assert not formats.quantize(formats.get(name), w, group).stored().dequantize()[w == 0].any()


PACKED = ["u1", "u2", "u3", "u4", "i4", "nf4", "f4e2m1", "u8", "i8", "u16"]


@pytest.mark.parametrize("element_type", PACKED)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 8, 9, 17, 64])
def test_packing_is_openvinos(element_type: str, count: int) -> None:
    """Byte by byte what OpenVINO's own packing makes of the same codes, and its inverse; empty bits are zero in both."""
    rng = np.random.default_rng(count)
    width = {"nf4": 4, "f4e2m1": 4}.get(element_type) or int(element_type[1:])
    low = -(2 ** (width - 1)) if element_type.startswith("i") else 0
    codes = rng.integers(low, low + 2**width, count).astype(np.int8 if low else np.uint16 if width == 16 else np.uint8)
    data = formats.pack(codes, element_type)
    assert data.nbytes == formats.packed_bytes((count,), element_type)
    assert np.array_equal(formats.unpack(data, element_type, (count,)), codes)
    # OpenVINO has no way from codes to its 4-bit floats but through the values.
    values = {"nf4": minmax.QLORA, "f4e2m1": np.append(minmax.E2M1, -minmax.E2M1)}.get(element_type, np.arange(1 << 16))[codes]
    if element_type.startswith("i"):
        values = codes
    constant = ops.constant(np.asarray(values, np.float32 if "f" in element_type else codes.dtype), getattr(ov.Type, element_type))
    assert np.array_equal(np.frombuffer(constant.data.tobytes(), np.uint8), data)


@pytest.mark.parametrize("element_type", PACKED)
def test_openvino_reads_what_was_packed(element_type: str) -> None:
    width = {"nf4": 4, "f4e2m1": 4}.get(element_type) or int(element_type[1:])
    codes = np.arange(2 ** min(width, 8)).astype(np.uint16 if width == 16 else np.uint8)[:-1]
    data = formats.pack(codes, element_type)
    tensor = ov.Tensor(np.ascontiguousarray(data), ov.Shape([codes.size]), getattr(ov.Type, element_type))
    model = ov.Model([ops.result(ops.convert(ops.constant(tensor, shared_memory=False), "f32"))], [])
    (values,) = ov.Core().compile_model(model, "CPU")([]).values()
    wanted = codes.astype(np.float32)
    if element_type.startswith("i"):
        wanted = np.where(wanted < 2 ** (width - 1), wanted, wanted - 2**width)
    if "f" in element_type:
        wanted = {"nf4": minmax.QLORA, "f4e2m1": np.append(minmax.E2M1, -minmax.E2M1)}[element_type][codes].astype(np.float32)
    # The runtime's conversion of nf4 goes through f16.
    np.testing.assert_allclose(values, wanted, rtol=2.0**-10 if element_type == "nf4" else 0)


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
    for name in (*formats.names(), *CODEBOOKS):
        weight = formats.quantize(formats.get(name), w, -1)
        parts = {p.name: p for p in formats.get(name).parts(w.shape, -1, "f32")}
        assert {n: b.nbytes for n, b in weight.packed().items()} == {n: p.nbytes for n, p in parts.items()}
        np.testing.assert_array_equal(evaluate(weight, "f32"), weight.dequantize())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("levels", ["1e38,3e38", "-3e38,3e38", "1e-45,1e-44", "-1e-31,0", "nan,1", "1,1", "1e40,2", "1", ""])
def test_tables_that_cannot_be_scaled_are_refused(levels: str) -> None:
    with pytest.raises(OptionError, match="codebook"):
        formats.get(f"codebook[{levels}]")
    assert formats.get("codebook[-1e29,0,1e-30]").top == np.float32(1e29)
