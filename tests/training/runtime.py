"""What the CPU plugin makes of a model: its answer, and which layers multiply bytes."""

from __future__ import annotations

import numpy as np
import openvino as ov

LAYERS = {"Convolution", "Deconvolution", "FullyConnected"}


def layer_types(model: ov.Model, x: np.ndarray) -> tuple[np.ndarray, list[tuple[str, bool]]]:
    """The first output, and each multiplying layer's type with whether it reads bytes. f32 elsewhere, or a machine with bf16 would round what is not quantized."""
    compiled = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    types = []
    for node in compiled.get_runtime_model().get_ops():
        info = {key: node.get_rt_info()[key].astype(str) for key in ("layerType", "runtimePrecision") if key in node.get_rt_info()}
        if info.get("layerType") in LAYERS:
            types.append((info["layerType"], info["runtimePrecision"] in ("i8", "u8")))
    return compiled(x)[0], types
