"""Which weights a compiled CPU model holds packed."""

from __future__ import annotations

from pathlib import Path

import openvino as ov

LARGE = 1024


def packed_types(xml: Path) -> set[str]:
    """Element types of the large constants that feed the compiled model's FullyConnected and Gather nodes.

    A weight that the plugin decompressed at load shows up as f32.
    """
    properties = {"INFERENCE_PRECISION_HINT": "f32"}
    runtime = ov.Core().compile_model(xml, "CPU", properties).get_runtime_model()
    found = set()
    for node in runtime.get_ops():
        kind = node.get_rt_info()["layerType"].astype(str) if "layerType" in node.get_rt_info() else ""
        if kind not in ("FullyConnected", "Gather", "MatMul"):
            continue
        for port in (0, 1):
            source = node.input_value(port).get_node()
            shape = source.get_output_partial_shape(0)
            is_const = source.get_rt_info()["layerType"].astype(str) == "Const"
            if is_const and shape.is_static and shape.get_min_shape() and _size(shape) >= LARGE:
                found.add(source.get_output_element_type(0).to_string())
    return found


def _size(shape: ov.PartialShape) -> int:
    size = 1
    for d in shape.get_min_shape():
        size *= d
    return size
