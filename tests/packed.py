"""Which weights a compiled CPU model holds packed."""

from __future__ import annotations

from math import prod
from pathlib import Path

import openvino as ov

LARGE = 1024
READERS = ("FullyConnected", "Gather", "MatMul")


def packed_types(xml: Path) -> set[str]:
    """Element types of the large constants that feed the compiled model's FullyConnected and Gather nodes.

    A weight that the plugin decompressed at load shows up as f32; one that it decompresses at every run does not show up.
    """
    return {kind for kind, readers in runtime_constants(xml) if readers & set(READERS)}


def decompressed_each_run(xml: Path) -> set[str]:
    """Element types of the large constants that no such node reads: operations of their own turn them into floats, run by run."""
    return {kind for kind, readers in runtime_constants(xml) if not readers & set(READERS)}


def runtime_constants(xml: Path) -> list[tuple[str, set[str]]]:
    """(element type, kinds of the nodes that read it) of the large constants of the compiled model."""
    properties = {"INFERENCE_PRECISION_HINT": "f32"}
    runtime = ov.Core().compile_model(xml, "CPU", properties).get_runtime_model()
    found = []
    for node in runtime.get_ops():
        shape = node.get_output_partial_shape(0) if node.get_output_size() else None
        # A port that the plugin leaves empty is a constant of a type called dynamic.
        if kind(node) == "Const" and shape is not None and shape.is_static and prod(shape.get_min_shape()) >= LARGE:
            # From port 2 on come the scales and zero points of a packed weight, in f32.
            readers = {kind(target.get_node()) for target in node.output(0).get_target_inputs() if target.get_index() < 2}
            if not readers:
                continue
            found.append((node.get_output_element_type(0).to_string(), readers))
    return found


def kind(node: ov.Node) -> str:
    info = node.get_rt_info()
    return info["layerType"].astype(str) if "layerType" in info else ""
