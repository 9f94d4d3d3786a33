"""`minmax` is NNCF's arithmetic to the bit: the same codes, scales and zero points on the same arrays, before and after f16 storage."""

from __future__ import annotations

import ml_dtypes
import nncf
import numpy as np
import pytest
from nncf.quantization.algorithms.weight_compression.config import WeightCompressionConfig
from nncf.quantization.algorithms.weight_compression.weight_lowering import compress_weight
from nncf.tensor import Tensor

from llmcomp import formats
from tests.formats.inputs import CASES

MODES = {name: nncf.CompressWeightsMode(name) for name in ("int8_asym", "int8_sym", "int4_asym", "int4_sym", "nf4")}
SOURCES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("group", [-1, 32, 64])
@pytest.mark.parametrize("name", MODES)
def test_codes_scales_and_zero_points_are_nncfs(name: str, group: int, case: str) -> None:
    w = CASES[case]
    theirs = compress_weight(Tensor(w.copy()), (1,), WeightCompressionConfig(MODES[name], group))
    ours = formats.quantize(formats.get(name), w, group)
    assert np.array_equal(ours.codes.astype(np.int32), as_codes(name, theirs.tensor.data).reshape(ours.codes.shape))
    scale = np.asarray(theirs.scale.data, np.float32)
    assert np.array_equal(ours.scale.view(np.uint32), scale.reshape(ours.scale.shape).view(np.uint32))
    with np.errstate(over="ignore"):
        assert np.array_equal(
            ours.scale.astype(np.float16).view(np.uint16), scale.astype(np.float16).reshape(ours.scale.shape).view(np.uint16)
        )
    if ours.zero_point is not None:
        assert np.array_equal(ours.zero_point.astype(np.int32), np.asarray(theirs.zero_point.data).reshape(ours.zero_point.shape))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", MODES)
def test_whole_models_hold_the_same_constants(name: str, source: str) -> None:
    """Through NNCF's public call on a graph, with its own kernels (weights of 10000 and more) and its own f16 storage."""
    import openvino as ov
    from openvino import opset13 as ops

    w = (np.random.default_rng(3).standard_t(4, (96, 256)) * 0.02).astype(SOURCES[source])
    kind = {"f32": ov.Type.f32, "f16": ov.Type.f16, "bf16": ov.Type.bf16}[source]
    raw = w.view(np.uint16) if w.dtype.itemsize == 2 else w
    tensor = ov.Tensor(raw, ov.Shape(list(w.shape)), kind)
    constant = ops.constant(tensor)
    weight = constant if source == "f32" else ops.convert(constant, "f32")
    x = ops.parameter([-1, 256], ov.Type.f32)
    model = ov.Model([ops.result(ops.matmul(x, weight, False, True))], [x])
    options = {} if name.startswith("int8") else {"ratio": 1.0, "group_size": 64, "all_layers": True}
    nncf.compress_weights(model, mode=MODES[name], **options)
    theirs = {n.get_friendly_name().rsplit("/", 1)[-1]: n for n in model.get_ops() if n.get_type_name() == "Constant"}
    codes = max(
        (n for n in theirs.values() if n.get_element_type().to_string() == formats.get(name).code_type), key=lambda n: n.get_byte_size()
    )
    ours = formats.quantize(formats.get(name), w, 64 if options else -1).stored()
    assert bytes(packed(codes)) == bytes(ours.packed()["codes"])
    assert bytes(packed(theirs["scale"])) == bytes(ours.packed()["scale"])
    if ours.zero_point is not None:
        assert bytes(packed(theirs["zero_point"])) == bytes(ours.packed()["zero_point"])


def packed(constant: object) -> np.ndarray:
    """The bytes of an OpenVINO constant, low-bit types as they are stored."""
    return np.ascontiguousarray(constant.data).view(np.uint8).reshape(-1)  # type: ignore[attr-defined]


def as_codes(name: str, data: object) -> np.ndarray:
    """NNCF's numpy path gives integers, and for NF4 the levels themselves."""
    array = np.asarray(data)
    if name != "nf4":
        return array.astype(np.int32)
    from llmcomp.formats.nf4 import LEVELS

    return np.abs(array[..., None].astype(np.float64) - LEVELS).argmin(-1).astype(np.int32)
