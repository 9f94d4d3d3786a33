"""Layers of every odd shape through plan, kernels, file and runtime: what the group does not fit falls to a stated one or to the backup."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from llmcomp import formats, kernels
from llmcomp.compressing import quantizer
from llmcomp.errors import GroupSizeError
from llmcomp.graph.factors import NO_FACTORS
from llmcomp.graph.layer import Layer
from llmcomp.graph.model import ModelGraph
from llmcomp.graph.skeleton import Skeleton
from llmcomp.options import ExportOptions
from llmcomp.planning import Plan, Scheme
from llmcomp.planning.assign import make_plan
from llmcomp.writing.ir import write_ir
from llmcomp.writing.journal import Journal
from llmcomp.writing.layout import make_layout
from llmcomp.writing.stream import stream
from tests.hand import MemoryCheckpoint

WIDTHS, ROWS = (1, 17, 48, 50, 2688, 4304), (1, 3, 64)
SHAPES = [(rows, width) for width in WIDTHS for rows in ROWS]
FORMATS = [*(name for name in formats.names() if name not in ("cb4", formats.ADAPTIVE)), "codebook[-1,-0.3,0,0.2,1]"]


def name_of(rows: int, width: int) -> str:
    return f"model.layers.0.k{width}n{rows}"


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> ModelGraph:
    """A MatMul of each shape; those of one width read one input. Weights grow from row to row, so that no row can stand for another."""
    folder, rng = tmp_path_factory.mktemp("skeleton"), np.random.default_rng(0)
    arrays = {f"{name_of(*shape)}.weight": rng.normal(size=shape) * np.arange(1, shape[0] + 1)[:, None] for shape in SHAPES}
    records: list[dict[str, Any]] = []
    inputs = {width: ops.parameter([-1, width], ov.Type.f32, name=f"x{width}") for width in WIDTHS}
    parameters, results = list(inputs.values()), []
    for name, array in arrays.items():
        weight = ops.parameter(list(array.shape), ov.Type.f32, name=f"llmcomp.weight.{len(records)}")
        records.append({"id": weight.get_friendly_name(), "tensor": name, "constant": f"self.{name}", "shape": list(array.shape)})
        parameters.append(weight)
        product = ops.matmul(inputs[array.shape[1]], weight, False, True, name=name.removesuffix(".weight"))
        product.output(0).set_names({name.removesuffix(".weight")})
        results.append(ops.result(product))
    ov.save_model(ov.Model(results, parameters, "shapes"), folder / "skeleton.xml", compress_to_fp16=False)
    manifest = {"task": "text-generation", "model_type": "shapes", "weights": records, "real": [], "fallback": None}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    checkpoint = MemoryCheckpoint({name: array.astype(np.float32) for name, array in arrays.items()})
    return ModelGraph(Skeleton(folder, "text-generation", "shapes", tuple(records), (), None, False), checkpoint)  # type: ignore[arg-type]


def planned(graph: ModelGraph, fmt: str, group: int | None, **others: Any) -> Plan:
    return make_plan(graph.layers, ExportOptions(model="m", weight_format=fmt, group_size=group, all_layers=True, **others))


def written(graph: ModelGraph, schemes: dict[str, Scheme], folder: Path) -> Path:
    layout, xml = make_layout(graph, schemes), folder / "openvino_model.xml"
    with Journal(folder / "journal.jsonl") as journal:
        _, tail = stream(graph, schemes, layout, xml.with_suffix(".bin"), quantizer(NO_FACTORS), kernels.non_finite, journal, 2)
    write_ir(graph, schemes, layout, tail, xml, {"version": "test"})
    return xml


def weight_of(graph: ModelGraph, layer: Layer, scheme: Scheme) -> np.ndarray:
    """What the scheme makes of the layer, by numpy."""
    w = np.asarray(graph.checkpoint.read(layer.tensor), np.float32)
    return formats.quantize(formats.get(scheme.format), w, scheme.group_size, scheme.rule).stored().dequantize()


def asked_sizes(name: str) -> list[int | None]:
    fmt = formats.get(name)
    if fmt.fixed_group or fmt.group_size == -1:
        return [None]
    # Between the others the plan alone differs, and that as with int4.
    return [128, 64, 32, 1, -1] if name == "int4_asym" else [128, 1, -1]


@pytest.mark.parametrize(("name", "group"), [(name, group) for name in FORMATS for group in asked_sizes(name)])
def test_every_shape_computes_what_its_dequantized_weight_computes(graph: ModelGraph, tmp_path: Path, name: str, group: int | None) -> None:
    plan = planned(graph, name, group, scale_rule="minmax")
    schemes = plan.schemes
    for layer in graph.layers:
        scheme = schemes[layer.name]
        assert scheme.group_size == -1 or layer.shape[-1] % scheme.group_size == 0
        assert scheme.format in (name, "int8_asym") and scheme.group_size <= (group or 32)
    xml = written(graph, schemes, tmp_path)
    model = ov.Core().compile_model(xml, "CPU", {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"})
    rng = np.random.default_rng(1)
    # One token and several take other kernels.
    for tokens in (1, 5):
        feed = {f"x{width}": rng.normal(size=(tokens, width)).astype(np.float32) for width in WIDTHS}
        found = model(feed)
        for layer in graph.layers:
            w, x = weight_of(graph, layer, schemes[layer.name]), feed[f"x{layer.shape[1]}"]
            y = x @ w.T.astype(np.float64)
            # Where codes are not kept packed the chain itself multiplies, in f16: half a unit in the last place of each product, 2^-11.
            bound = 2.0**-10 * (np.abs(x) @ np.abs(w.T)) + 1e-6
            assert (np.abs(found[layer.name] - y) <= bound).all(), layer.name
    total = sum(layer.size for layer in graph.layers)
    stored = sum(entry.bytes for entry in plan.layers)
    assert plan.summary.bits_per_weight == pytest.approx(8 * stored / total, abs=1e-3)


@pytest.mark.parametrize(("group", "fitting"), [(128, (2688,)), (64, (2688,)), (32, (2688,)), (1, WIDTHS), (-1, (48, 50, 2688, 4304))])
def test_what_does_not_fit_is_refused_by_name_if_asked(graph: ModelGraph, group: int, fitting: tuple[int, ...]) -> None:
    odd = [shape for shape in SHAPES if shape[1] not in fitting]
    if not odd:
        assert {entry.group_size for entry in planned(graph, "int4", group, group_size_fallback="error").layers} == {group}
        return
    with pytest.raises(GroupSizeError) as caught:
        planned(graph, "int4", group, group_size_fallback="error")
    assert all(f"{name_of(*shape)} ({shape[1]})" in str(caught.value) for shape in odd) and f"{len(odd)} layers" in str(caught.value)
    assert not any(name_of(*shape) + " " in str(caught.value) for shape in SHAPES if shape not in odd)
