"""A two-block model written by hand in OpenVINO operations, as a skeleton, with a checkpoint in memory: no torch, milliseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import openvino as ov
from openvino import opset13 as ops

from llmcomp.checkpoint import TensorInfo
from llmcomp.graph.model import ModelGraph
from llmcomp.graph.skeleton import Skeleton

SPELLING = {np.dtype(ml_dtypes.bfloat16): "BF16", np.dtype(np.float16): "F16", np.dtype(np.float32): "F32"}
VOCABULARY, HIDDEN, INNER = 40, 64, 96


class MemoryCheckpoint:
    """What ModelGraph needs of a Checkpoint, over arrays."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays, self.source, self.folder, self.config = arrays, "memory", None, {}
        self.tensors = {n: TensorInfo(n, SPELLING[a.dtype], a.shape, Path("memory"), 0, a.nbytes) for n, a in arrays.items()}

    def read(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def encoded(self, name: str) -> None:
        """Arrays are floats."""

    def prefetch(self, name: str, start: int, stop: int) -> None:
        """Arrays are in memory."""

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self.arrays[name][start:stop]

    def window(self, name: str, index: int | None, rows: slice, columns: slice) -> np.ndarray:
        return (self.arrays[name] if index is None else self.arrays[name][index])[rows, columns]

    def picked(self, name: str, numbers: np.ndarray) -> np.ndarray:
        return self.arrays[name][numbers]


def weights(seed: int = 0, dtype: Any = ml_dtypes.bfloat16) -> dict[str, np.ndarray]:
    """Tensors of the hand-made model; `model.layers.N.conv.weight` is stored (in, out)."""
    rng = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for i in range(2):
        shapes[f"model.layers.{i}.up.weight"] = (INNER, HIDDEN)
        shapes[f"model.layers.{i}.down.weight"] = (HIDDEN, INNER)
        shapes[f"model.layers.{i}.conv.weight"] = (HIDDEN, HIDDEN)
    return {n: (rng.normal(size=s) / np.sqrt(s[1])).astype(dtype) for n, s in shapes.items()}


def hand_graph(folder: Path, arrays: dict[str, np.ndarray] | None = None) -> ModelGraph:
    """The model as `llmcomp.graph` would hand it over: the table is tied to the head, each block is x + conv(down(relu(up(x))))."""
    arrays = arrays if arrays is not None else weights()
    records: list[dict[str, Any]] = []
    parameters = []

    def weight(name: str) -> Any:
        array = arrays[name]
        kind = {"BF16": ov.Type.bf16, "F16": ov.Type.f16, "F32": ov.Type.f32}[SPELLING[array.dtype]]
        parameter = ops.parameter(list(array.shape), kind, name=f"llmcomp.weight.{len(records)}")
        records.append({"id": parameter.get_friendly_name(), "tensor": name, "constant": f"self.{name}", "shape": list(array.shape)})
        parameters.append(parameter)
        return parameter if kind == ov.Type.f32 else ops.convert(parameter, "f32")

    ids = ops.parameter([-1, -1], ov.Type.i64, name="input_ids")
    ids.output(0).set_names({"input_ids"})
    table = weight("model.embed_tokens.weight")
    x = ops.gather(table, ids, ops.constant(0), name="embed")
    for i in range(2):
        y = ops.matmul(x, weight(f"model.layers.{i}.up.weight"), False, True, name=f"up{i}")
        y = ops.matmul(ops.relu(y), weight(f"model.layers.{i}.down.weight"), False, True, name=f"down{i}")
        y = ops.matmul(y, weight(f"model.layers.{i}.conv.weight"), False, False, name=f"conv{i}")
        x = ops.add(x, y, name=f"residual{i}")
    norm = np.linspace(0.5, 1.5, HIDDEN, dtype=np.float32)
    x = ops.multiply(x, ops.constant(norm[None, None]), name="norm")
    logits = ops.matmul(x, table, False, True, name="head")
    logits.output(0).set_names({"logits"})
    model = ov.Model([ops.result(logits)], [ids, *parameters], "hand")
    folder.mkdir(parents=True, exist_ok=True)
    ov.save_model(model, folder / "skeleton.xml", compress_to_fp16=False)
    manifest = {"task": "text-generation", "model_type": "hand", "weights": records, "real": [], "fallback": None}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    skeleton = Skeleton(folder, "text-generation", "hand", tuple(records), (), None, False)
    return ModelGraph(skeleton, MemoryCheckpoint(arrays))  # type: ignore[arg-type]


def logits(arrays: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """The hand-made model in float64 numpy."""
    w = {n: a.astype(np.float64) for n, a in arrays.items()}
    x = w["model.embed_tokens.weight"][ids]
    for i in range(2):
        y = np.maximum(x @ w[f"model.layers.{i}.up.weight"].T, 0) @ w[f"model.layers.{i}.down.weight"].T
        x = x + y @ w[f"model.layers.{i}.conv.weight"]
    return x * np.linspace(0.5, 1.5, HIDDEN) @ w["model.embed_tokens.weight"].T
