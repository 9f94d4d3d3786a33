"""Permuting, the stage that sorts the inner channels of MLPs before anything reads their weights to compress them.

comes in: a graph, a plan
goes out: the same model as a graph with these channels in another order
may import: algorithms, folding, graph, planning
read first: this file, then graph/inner.py
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from llmcomp import planning
from llmcomp.algorithms.permutation import falling_order
from llmcomp.folding import sampled_rows
from llmcomp.graph.inner import Inner, find_inner, reorder
from llmcomp.graph.model import ModelGraph
from llmcomp.planning import Plan


def choose_inner(graph: ModelGraph, plan: Plan) -> tuple[Inner, ...]:
    """The inner dimensions along which low-bit layers have several groups, none if `plan.permutation` says so; no weight is read.

    Layers that keep the codes of the source keep their order, too.
    """
    if plan.permutation == "none":
        return ()
    schemes = plan.schemes

    def helps(one: Inner) -> bool:
        if any(schemes[name].is_stored for name in (*one.writers, *one.readers)):
            return False
        return any(planning.is_low(schemes[name].format) and 0 < schemes[name].group_size < one.channels for name in one.readers)

    return tuple(one for one in find_inner(graph) if helps(one))


def permute(graph: ModelGraph, chosen: Sequence[Inner], workers: int = 1) -> tuple[ModelGraph, list[dict[str, Any]]]:
    """The graph with the channels of each sorted by the magnitude of its readers' columns, and a line for the report on each."""
    layers = {layer.name: layer for layer in graph.layers}
    told: list[dict[str, Any]] = []
    with ThreadPoolExecutor(workers, "llmcomp-permute") as pool:
        orders = pool.map(lambda one: falling_order(tile for name in one.readers for tile in sampled_rows(graph, layers[name])), chosen)
        for one, order in zip(chosen, orders, strict=True):
            graph = reorder(graph, one, order)
            told.append({"rows": list(one.writers), "columns": list(one.readers), "channels": one.channels})
    return graph, told
