"""`minmax` is NNCF's arithmetic to the bit: the same codes, scales and zero points on the same arrays, before and after storage.

NNCF 3.4.0 has its rules twice, in numpy and as OpenVINO models for weights of 10000 and more. Where the two differ, or lose an exact power
of two in a logarithm, the test says which is right.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import nncf
import numpy as np
import pytest
from nncf.quantization.algorithms.weight_compression.config import WeightCompressionConfig
from nncf.quantization.algorithms.weight_compression.weight_lowering import compress_weight
from nncf.tensor import Tensor

from llmcomp import formats
from llmcomp.formats import NUMPY
from tests.formats.inputs import CASES

BOOK = "codebook[-1,-0.625,-0.25,0,0.125,0.5,1]"
NAMES = (*(name for name in formats.names() if name != formats.ADAPTIVE), BOOK)
"""NNCF has no adaptive codebook without data; until its levels are fitted ours is CB4."""
SOURCES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
MAXIMA = {"f4e2m1": 6.0, "f8e4m3": 448.0}
LEAST = 2.0**-23


def mode(name: str) -> Any:
    return nncf.CompressWeightsMode(name.partition("[")[0])


def groups(name: str) -> list[int]:
    fmt = formats.get(name)
    return [fmt.group_size] if fmt.fixed_group else [-1, 32, 64]


def book(name: str) -> np.ndarray | None:
    fmt = formats.get(name)
    return np.array(fmt.table, np.float32) if fmt.level_count else None  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ["numpy", "openvino"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_codes_scales_and_zero_points_are_nncfs(name: str, case: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NNCF_DISABLE_OPTIMIZED_COMPRESSION", raising=False)
    if path == "numpy":
        monkeypatch.setenv("NNCF_DISABLE_OPTIMIZED_COMPRESSION", "1")
    fmt, w = formats.get(name), np.concatenate([CASES[case]] * 3)
    for group in groups(name):
        table = book(name)
        config = WeightCompressionConfig(mode(name), group, None if table is None else Tensor(table))
        with np.errstate(over="ignore", divide="ignore"):
            theirs = compress_weight(Tensor(w.copy()), (1,), config)
        ours = formats.quantize(fmt, w, group)
        scale = np.asarray(theirs.scale.data, np.float32).reshape(ours.scale.shape)
        same = np.ones(scale.shape, bool)
        amax = np.abs(w.reshape(ours.codes.shape)).max(-1, keepdims=True)
        if fmt.code_type in MAXIMA and path == "openvino":
            # The models guard the largest magnitude instead of the scale. Ours is the numpy path's, which all other formats have as well.
            same = amax >= LEAST * MAXIMA[fmt.code_type]
        if name == "nvfp4":
            stored, second = ours.stored_scale().values()
            assert np.asarray(theirs.global_scale.data, np.float32).reshape(-1).view(np.uint32) == second.reshape(-1).view(np.uint32)
            ratio = NUMPY.from_f8e4m3(stored)
            assert np.array_equal(ratio[same], scale[same])
        elif name.startswith("mx"):
            # NNCF takes the logarithm in f32. As ln / ln 2 it comes out above that of an exact power of two (at 2^-15 and 2^-13), and
            # the scale is doubled for nothing; and that of the next numbers above a power is the power's, so that what is beyond the
            # type's range is cut. Ours is the least power that keeps the largest magnitude in range: see test_formats.
            reach = np.float64(amax) / MAXIMA[fmt.code_type]
            doubled = same & (scale == 2 * ours.scale)
            halved = same & (scale == ours.scale / 2)
            assert (reach[doubled] == ours.scale[doubled]).all()
            assert ((reach[halved] > scale[halved]) & (reach[halved] < scale[halved] * (1 + 2.0**-20))).all()
            assert set(np.log2(ours.scale[doubled])) <= ({-13.0, -15.0} if path == "openvino" else set())
            assert np.array_equal(ours.scale[same & ~doubled & ~halved], scale[same & ~doubled & ~halved])
            if case == "ends of types":
                assert doubled.any() == (path == "openvino")
            same &= ~doubled & ~halved
        else:
            assert np.array_equal(ours.scale.view(np.uint32)[same], scale.view(np.uint32)[same])
            if fmt.scale_type is None:
                with np.errstate(over="ignore"):
                    f16 = [x.astype(np.float16).view(np.uint16)[same] for x in (ours.scale, scale)]
                assert np.array_equal(*f16)
        if ours.zero_point is not None:
            assert np.array_equal(ours.zero_point.astype(np.int32), np.asarray(theirs.zero_point.data).reshape(ours.zero_point.shape))
        equal = values(ours) == as_values(name, theirs, ours.codes.shape)
        assert equal[np.broadcast_to(same, equal.shape)].all()


def values(weight: formats.CompressedWeight) -> np.ndarray:
    """What the codes stand for before the scale: integers, indices, or levels. Minus zero is zero."""
    fmt = weight.format
    codes = NUMPY.numbers(weight.codes, fmt.code_type)
    if fmt.code_type in ("nf4", "f4e2m1", "f8e4m3"):
        return fmt.decode(NUMPY, codes, np.float32(1))
    return codes


def as_values(name: str, theirs: Any, shape: tuple[int, ...]) -> np.ndarray:
    """NNCF gives integers, indices, or levels."""
    found = np.asarray(theirs.tensor.data, np.float32).reshape(shape)
    # NNCF adds the offset of INT3 and INT2 when it builds the constant.
    return found + {"int3_sym": 4, "int2_sym": 2}.get(name, 0)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", NAMES)
def test_whole_models_hold_the_same_constants(name: str, source: str) -> None:
    """Through NNCF's public call on a graph, with its own kernels (weights of 10000 and more) and its own storage."""
    import openvino as ov
    from openvino import opset13 as ops

    fmt, w = formats.get(name), (np.random.default_rng(3).standard_t(4, (96, 256)) * 0.02).astype(SOURCES[source])
    kind = {"f32": ov.Type.f32, "f16": ov.Type.f16, "bf16": ov.Type.bf16}[source]
    raw = w.view(np.uint16) if w.dtype.itemsize == 2 else w
    constant = ops.constant(ov.Tensor(raw, ov.Shape(list(w.shape)), kind))
    weight = constant if source == "f32" else ops.convert(constant, "f32")
    x = ops.parameter([-1, 256], ov.Type.f32)
    model = ov.Model([ops.result(ops.matmul(x, weight, False, True))], [x])
    group = -1 if name.startswith("int8") else fmt.group_size if fmt.fixed_group else 64
    options: dict[str, Any] = {} if name.startswith("int8") else {"ratio": 1.0, "all_layers": True}
    if group != -1 and not fmt.fixed_group:
        options["group_size"] = group
    if "[" in name:
        options["advanced_parameters"] = nncf.AdvancedCompressionParameters(codebook=book(name))
    nncf.compress_weights(model, mode=mode(name), **options)
    constants = [n for n in model.get_ops() if n.get_type_name() == "Constant"]
    theirs = {n.get_friendly_name().rsplit("/", 1)[-1]: n for n in constants}
    codes = max((n for n in constants if n.get_element_type().to_string() == fmt.code_type), key=lambda n: n.get_byte_size())
    ours = formats.quantize(fmt, w, group).stored().packed()
    if name.startswith("mx"):
        # Groups whose scale NNCF doubles for nothing, as above: with bf16's few mantissas they occur (a scale of 2^-13 is byte 114).
        doubled = packed(theirs["scale"]) == ours["scale"] + 1
        assert set(ours["scale"][doubled]) <= {112, 114} and doubled.mean() < 0.01
        of = {"codes": (codes, -1), "scale": (theirs["scale"], 1)}
        for part, (found, size) in of.items():
            assert np.array_equal(packed(found).reshape(doubled.size, size)[~doubled], ours[part].reshape(doubled.size, size)[~doubled])
        return
    assert bytes(packed(codes)) == bytes(ours.pop("codes"))
    if "codebook" in ours:
        # NNCF stores a table of the user's in the type that it was given in, ours is the narrowest that holds it; CB4 is f8e4m3 in both.
        table = ours.pop("codebook")
        (found,) = [n for n in constants if list(n.shape) == [fmt.level_count]]
        if name == "cb4":
            assert found.get_element_type() == ov.Type.f8e4m3 and bytes(packed(found)) == bytes(table)
        else:
            assert np.array_equal(found.data, book(name))
    for part, data in ours.items():
        assert bytes(packed(theirs[part])) == bytes(data), part


def packed(constant: Any) -> np.ndarray:
    """The bytes of an OpenVINO constant, low-bit types as they are stored."""
    return np.frombuffer(constant.data.tobytes(), np.uint8)
