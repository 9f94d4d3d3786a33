from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmcomp import formats
from llmcomp.graph.layer import Layer
from llmcomp.graph.model import ModelGraph
from llmcomp.planning import Scheme
from llmcomp.writing.ir import write_ir
from llmcomp.writing.journal import Journal
from llmcomp.writing.layout import make_layout
from llmcomp.writing.stream import stream


def numpy_quantizer(layer: Layer, scheme: Scheme, w: np.ndarray, start: int) -> Any:
    fmt = formats.get(scheme.format)
    weight = formats.quantize(fmt, w, scheme.group_size, scheme.rule)
    packed = weight.packed()
    zero_point = packed["zero_point"] if fmt.zero_point_type else None
    finite = bool(np.isfinite(w.astype(np.float32)).all())
    return SimpleNamespace(codes=packed["codes"], scale=weight.scale, zero_point=zero_point, finite=finite)


def count_non_finite(w: np.ndarray) -> tuple[int, int | None]:
    bad = ~np.isfinite(np.asarray(w, np.float32)).reshape(-1)
    return int(bad.sum()), int(bad.argmax()) if bad.any() else None


@pytest.fixture
def write() -> Callable[..., Any]:
    """Writes a graph with one scheme for its table and one for everything else; the numpy oracle quantizes."""

    def run(graph: ModelGraph, folder: Path, scheme: Scheme, table: Scheme | None = None, workers: int = 2) -> Any:
        folder.mkdir(parents=True, exist_ok=True)
        schemes = {layer.name: (table or scheme) if "Gather" in layer.ops else scheme for layer in graph.layers}
        layout = make_layout(graph, schemes)
        xml = folder / "openvino_model.xml"
        with Journal(folder / "journal.jsonl") as journal:
            outcomes, tail = stream(graph, schemes, layout, xml.with_suffix(".bin"), numpy_quantizer, count_non_finite, journal, workers)
        write_ir(graph, schemes, layout, tail, xml, {"version": "test"})
        return SimpleNamespace(xml=xml, schemes=schemes, layout=layout, outcomes=outcomes, tail=tail, journal=folder / "journal.jsonl")

    return run
