"""What an export will need, before it starts: bytes of disk, bytes of memory, seconds."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from llmcomp import formats
from llmcomp.checkpoint import Checkpoint
from llmcomp.graph.model import ModelGraph, flat_rows
from llmcomp.options import ExportOptions
from llmcomp.planning import Scheme
from llmcomp.writing.layout import Layout
from llmcomp.writing.stored import stored_tile
from llmcomp.writing.stream import SPARE_WORKERS, Quantizer, tile_rows

TRACE_BYTES = 900 << 20
"""Anonymous memory of the tracing child, all of it interpreter and libraries (measured: 858 MiB for a 1.2 B llama, 16 blocks)."""
BASE_BYTES = 200 << 20
"""Our own interpreter with numpy and OpenVINO."""
TILE_FACTOR = 24
"""Bytes per weight of a tile in flight: source, f32 image, kernel intermediates, codes, and one tile queued."""


@dataclass(frozen=True)
class Forecast:
    bin_bytes: int
    memory_bytes: int
    compress_seconds: float
    """Measured on one tile of each kind, on this machine, now."""
    more_disk_bytes: int = 0
    """Of calibration, beside the .bin while it is made."""
    calibrate_seconds: float | None = None
    """Of pushing the data through the model and summing up; None without calibration. What its methods compute comes on top."""
    share: float = 1.0
    """Of the weights that are to get a format, those that get it."""


def total(found: Sequence[Forecast]) -> Forecast:
    """Of submodels that are made one after the other."""
    calibrating = [one.calibrate_seconds for one in found if one.calibrate_seconds is not None]
    return Forecast(
        sum(one.bin_bytes for one in found),
        max(one.memory_bytes for one in found),
        sum(one.compress_seconds for one in found),
        max(one.more_disk_bytes for one in found),
        sum(calibrating) if calibrating else None,
    )


def least_bytes(checkpoint: Checkpoint, options: ExportOptions) -> int:
    """A lower bound of the .bin from headers alone, for a check in the first second; the layout gives the exact figure later."""
    fixed = {"fp32": 32, "fp16": 16, "int8": 8, "keep": 2}
    bits = fixed.get(options.weight_format, 4)
    if formats.exists(options.weight_format):
        bits = formats.get(options.weight_format).bits
    return sum(prod(t.shape) * bits // 8 for t in checkpoint.tensors.values() if len(t.shape) > 1)


def forecast(graph: ModelGraph, schemes: Mapping[str, Scheme], layout: Layout, quantize: Quantizer, workers: int) -> Forecast:
    """Exact size, bounded memory, and the time that one tile of each kind of layer takes, multiplied."""
    kinds = defaultdict(list)
    for layer in graph.layers:
        kinds[schemes[layer.name], layer.shape[-1], layer.dtype].append(layer)
    seconds, widest = 0.0, 0
    for (scheme, width, _), layers in kinds.items():
        rows = min(tile_rows(width), flat_rows(layers[0]))
        widest = max(widest, rows * width)
        if not formats.exists(scheme.format):
            continue
        w = graph.rows(layers[0], 0, rows)
        for _ in range(2):
            # The first compiles, or brings the pages into memory.
            started = time.perf_counter()
            if scheme.is_stored:
                stored_tile(graph, layers[0], scheme, 0, rows)
            else:
                quantize(layers[0], scheme, w, 0)
            taken = time.perf_counter() - started
        seconds += taken * sum(layer.size for layer in layers) / w.size / workers
    memory = max(TRACE_BYTES + BASE_BYTES, BASE_BYTES + (workers + SPARE_WORKERS) * widest * TILE_FACTOR)
    return Forecast(layout.size, memory, seconds)
