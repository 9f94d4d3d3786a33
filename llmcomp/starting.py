"""Starting, the stage between a compressed model and its training: what has been written, read back by the names of the checkpoint.

comes in: a graph and what has been written of it
goes out: Begun
may import: errors, formats, graph, planning, training, writing
read first: begun_of
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp import formats, planning
from llmcomp.compressing import Written
from llmcomp.errors import OptionError
from llmcomp.formats import CompressedWeight
from llmcomp.graph.layer import Layer
from llmcomp.graph.model import ModelGraph
from llmcomp.planning import Plan
from llmcomp.training.fake_quantize import check_trainable
from llmcomp.training.nls import Space, check_ranks
from llmcomp.training.quantized import check_rank
from llmcomp.training.start import Begun, trained_of

NORMS = ("norm", "norm without a weight")


def begun_of(graph: ModelGraph, written: Written, folder: Path) -> Begun:
    """
    Raises:
        OptionError: a layer in a format, or with something beside it, that is not trained.
    """
    names = {layer.name: layer.tensor for layer in graph.layers}
    data = np.memmap(folder / f"{graph.skeleton.name}.bin", np.uint8, "r")
    weights = {}
    for layer, scheme in planning.stored(graph.layers, written.plan.schemes):
        if scheme.is_float:
            continue
        _check(graph, layer, scheme)
        weights[layer.tensor] = _weight(layer, scheme, written, data)
    factors, normed = written.factors, []
    for one in written.done.folds:
        if one["from"] in NORMS:
            normed.append([names[name] for name in one["into"]])
        elif one["from"] not in names and any(np.any(factors.columns[name] != 1) for name in one["into"] if name in factors.columns):
            raise OptionError(
                f"the fold into {one['into'][0]}", f"it is a {one['from']}, which a torch model has no place for", "Use --folds none"
            )
    columns = {names[name]: value for name, value in factors.columns.items()}
    return Begun(weights, columns, {names[name]: value for name, value in factors.rows.items()}, normed)


def check_plan(graph: ModelGraph, plan: Plan, rank: int, ranks: Sequence[int] = (), budget: int | None = None) -> None:
    """
    Raises:
        OptionError: as `begun_of`, as far as the plan tells; a rank that is larger than a layer; no choice of `ranks` within `budget`.
    """
    kinds = {}
    for layer, scheme in planning.stored(graph.layers, plan.schemes):
        if not scheme.is_float:
            _check(graph, layer, scheme)
            kinds[layer.tensor] = (formats.get(scheme.format).bits, layer.shape)
    low = trained_of({tensor: bits for tensor, (bits, _) in kinds.items()})
    for tensor in low:
        check_rank(rank, kinds[tensor][1], tensor)
    if ranks:
        Space(check_ranks(ranks), tuple(sum(kinds[tensor][1]) for tensor in low)).start(budget)


def _check(graph: ModelGraph, layer: Layer, scheme: planning.Scheme) -> None:
    if scheme.adapter_rank:
        raise OptionError("--lora-correction", f"{layer.name} has an adapter beside it, which training would not know", "Leave it out")
    if not formats.exists(scheme.format):
        raise OptionError(f"format {scheme.format}", "only integer formats are trained", "Use int4_asym, int4_sym or int8")
    check_trainable(formats.get(scheme.format), formats.get(scheme.format).zero_point_type is not None)
    pieces = graph.sources[layer.name].pieces
    if len(layer.shape) != 2 or pieces is None or len(pieces.tensors) != 1:
        raise OptionError(
            layer.name,
            "it is no matrix that the checkpoint stores by itself, as experts are not, and is not trained",
            "Export it without training",
        )


def _weight(layer: Layer, scheme: planning.Scheme, written: Written, data: NDArray[Any]) -> CompressedWeight:
    fmt, arrays = formats.get(scheme.format), {}
    for (name, part), slot in written.layout.slots.items():
        if name == layer.name:
            arrays[part] = slot
    if layer.name in written.done.tail:
        arrays["scale"] = written.done.tail[layer.name]
    read = {
        part: np.array(formats.unpack(np.asarray(data[slot.offset : slot.end]), slot.part.element_type, slot.part.shape))
        for part, slot in arrays.items()
        if slot.part.role != "fixed"
    }
    grouped = formats.grouped_shape(layer.shape, scheme.group_size)
    per_group = (*grouped[:-1], 1)
    zeros = read.get("zero_point")
    return CompressedWeight(
        fmt,
        layer.shape,
        scheme.group_size,
        read["codes"].reshape(grouped),
        read["scale"].reshape(per_group),
        None if zeros is None else zeros.reshape(per_group),
    )
