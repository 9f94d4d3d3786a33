"""Rows of a layer that keeps the codes of the source, packed as they are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp import formats
from llmcomp.errors import LlmcompError
from llmcomp.formats import pack
from llmcomp.formats.nvfp4 import NvFp4
from llmcomp.graph.layer import Layer
from llmcomp.graph.model import ModelGraph
from llmcomp.graph.stored import Form, stored_lines, stored_order, stored_second
from llmcomp.planning import ORDER, Scheme

TOLERANCE = 1e-12
"""Relative squared error from which on repacked rows are not those of the source: rounding a zero point to f32 leaves 1e-14."""
E4M3_NAN = 0x7F
"""Its code, but for the sign."""


@dataclass(frozen=True)
class StoredTile:
    """As `kernels.Tile`."""

    codes: NDArray[np.uint8]
    scale: NDArray[np.float32]
    zero_point: NDArray[np.uint8] | None
    finite: bool


def stored_tile(graph: ModelGraph, layer: Layer, scheme: Scheme, start: int, stop: int) -> StoredTile:
    """Rows [start, stop), leading axes flattened."""
    fmt = formats.get(scheme.format)
    lines = stored_lines(graph, layer, Form(scheme.format, scheme.group_size, scheme.scale_type, scheme.sorted), start, stop)
    finite = bool(np.isfinite(lines.scale).all())
    if fmt.code_type == "f8e4m3":
        finite = finite and not bool(((lines.codes & 0x7F) == E4M3_NAN).any())
    zeros = None
    if lines.zero_point is not None:
        finite = finite and bool(np.isfinite(lines.zero_point).all())
        zeros = pack(lines.zero_point, str(fmt.zero_point_type))
    per_group = (*formats.grouped_shape((stop - start, layer.shape[-1]), scheme.group_size)[:-1], 1)
    scale = np.ascontiguousarray(lines.scale, np.float32).reshape(per_group)
    return StoredTile(pack(lines.codes, fmt.code_type), scale, zeros, finite)


def stored_constants(graph: ModelGraph, layer: Layer, scheme: Scheme, scale: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
    """What is written of a layer beside its rows, given the scales of all of them."""
    fmt = formats.get(scheme.format)
    found = fmt.store_under(scale, stored_second(graph, layer)) if isinstance(fmt, NvFp4) else fmt.store_scale(scale, scheme.scale_type)
    return {**found, **({ORDER: stored_order(graph, layer).astype(np.int32)} if scheme.sorted else {})}


def check_same(layer: Layer, scheme: Scheme, error: float) -> None:
    """Raises LlmcompError if sampled rows of a layer, read back, are not what the source stands for."""
    if scheme.is_stored and error > TOLERANCE:
        raise LlmcompError(
            layer.name,
            f"its codes repacked as {scheme.format} are not the weight that they are decoded to (relative squared error {error:.1e})",
            f"Please report this; --override '{layer.name}=keep' leaves it float",
        )
