"""A float model with the weights that a written folder stands for: dequantized in numpy from the source, by the report."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from llmcomp import checkpoint as checkpoints
from llmcomp import formats
from llmcomp.algorithms.search import search
from llmcomp.export import plan_model
from llmcomp.folding import choose_folds, fold
from llmcomp.graph.model import ModelGraph, flat_rows
from llmcomp.graph.skeleton import get_skeletons
from llmcomp.options import ExportOptions
from llmcomp.permuting import choose_inner, permute
from llmcomp.planning import COMPRESSION_FIELDS


def dequantized_ir(folder: Path, source: Path, scratch: Path) -> Path:
    """Path of an f32 IR: the source's skeleton with every weight replaced by numpy's own rounding of the source."""
    checkpoint = checkpoints.open(str(source))
    skeleton = get_skeletons(checkpoint)[0]
    graph = ModelGraph(skeleton, checkpoint)
    layers = {layer.tensor: layer for layer in graph.layers}
    tensors = {w["id"]: w["tensor"] for w in skeleton.weights}
    report = json.loads((folder / "report.json").read_text())
    schemes = {layer["tensor"]: layer for layer in report["layers"]}
    asked = {k: v for k, v in report["settings"].items() if k in COMPRESSION_FIELDS and v}
    plan = plan_model(ExportOptions(model=str(source), no_tokenizer=True, **asked))
    graph, _ = permute(graph, choose_inner(graph, plan))
    factors, _ = fold(graph, plan, choose_folds(graph, plan))
    model = ov.Core().read_model(skeleton.xml)
    constants = {
        graph.ir.name(n): np.frombuffer(graph.constant_bytes(n), "<f4").reshape(graph.ir.output_shape(n)) for n in graph.vector_orders
    }
    constants |= {graph.ir.name(number): values for number, values in factors.constants.items()}
    for number, values in factors.inserted.items():
        output = next(node for node in model.get_ops() if node.get_friendly_name() == graph.ir.name(number)).output(0)
        targets = output.get_target_inputs()
        product = ops.multiply(output, ops.constant(values))
        for target in targets:
            target.replace_source_output(product.output(0))
    for parameter in model.get_parameters():
        tensor = tensors.get(parameter.get_friendly_name())
        if tensor is None:
            continue
        scheme = schemes[tensor]
        layer = layers[tensor]
        w = np.asarray(graph.rows(layer, 0, flat_rows(layer)), np.float32).reshape(layer.shape)
        if formats.exists(scheme["format"]):
            w = factors.apply(scheme["name"], w, range(len(w)))
            w = rounded(w, scheme["table"] or scheme["format"], scheme["group_size"], scheme["rule"])
        constant = ops.constant(w)
        for target in parameter.output(0).get_target_inputs():
            reader = target.get_node()
            if reader.get_type_name() == "Convert":
                for inner in reader.output(0).get_target_inputs():
                    inner.replace_source_output(constant.output(0))
            else:
                target.replace_source_output(constant.output(0))
        model.remove_parameter(parameter)
    for constant in model.get_ordered_ops():
        values = constants.get(constant.get_friendly_name())
        if values is not None:
            assert constant.get_type_name() == "Constant"
            constant.output(0).replace(ops.constant(values).output(0))
    out = scratch / "dequantized.xml"
    ov.save_model(model, out, compress_to_fp16=False)
    return out


def rounded(w: np.ndarray, name: str, group_size: int, rule: str) -> np.ndarray:
    fmt = formats.get(name)
    if rule != "search":
        return formats.quantize(fmt, w, group_size, rule).stored().dequantize()
    scale = search(formats.NUMPY, fmt, w.reshape(formats.grouped_shape(w.shape, group_size)))["scale"]
    return formats.quantize(fmt, w, group_size, rule, scale).stored().dequantize()
