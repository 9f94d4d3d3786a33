"""Calibration, the stage that compresses block by block what data is to have a say in.

comes in: a graph, a plan, its folds, token rows
goes out: Factors for all folds, and each calibrated layer compressed, handed on as soon as it is ready
may import: algorithms, calibration, formats, graph, kernels, planning
read first: this file, then calibration/runner.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp import formats, kernels, planning
from llmcomp.algorithms import awq, equalize
from llmcomp.algorithms.awq import quadratic_loss
from llmcomp.algorithms.search import scale_estimation, search
from llmcomp.calibration.runner import OpenSection, Runner
from llmcomp.formats import CompressedWeight
from llmcomp.graph.factors import Factors, make_factors
from llmcomp.graph.folds import Fold
from llmcomp.graph.layer import Layer
from llmcomp.graph.model import ModelGraph
from llmcomp.graph.sections import Section, Sections
from llmcomp.kernels import Given
from llmcomp.planning import Plan, Scheme

SAMPLED_ROWS = 256
"""Rows of a weight by which the factors of a fold are chosen."""
RULES = {planning.SEARCH: search, planning.SCALE_ESTIMATION: scale_estimation}

Put = Callable[[Layer, CompressedWeight, float, float], None]
"""(layer, its compressed weight with f32 scales, relative squared error of its weights, seconds)."""


@dataclass
class Calibrated:
    """What came of it."""

    factors: Factors
    folds: list[dict[str, Any]]
    """A line for the report on each fold."""
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Layer name -> output_error: mean squared error of its outputs relative to their power; plain_error: that of plain rounding."""


def calibrate(
    graph: ModelGraph, plan: Plan, folds: Sequence[Fold], sections: Sections, rows: Sequence[NDArray[np.int64]], put: Put, scratch: Path
) -> Calibrated:
    """Compress the layers that the plan wants calibrated, in the order of the graph.

    Each section sees what comes out of the sections before it, compressed as they will be. `folds` are those of `inner_folds`.
    """
    stage = _Stage(graph, plan, put)
    chosen: dict[int, NDArray[np.float32]] = {}
    told: dict[int, dict[str, Any]] = {}
    with Runner(sections, rows, scratch) as runner:
        runner.start(stage.first_weights(sections, runner.used_ids()))
        for section in sections.parts[1:]:
            opened = runner.open(section)
            places = [i for i, fold in enumerate(folds) if _inside(fold, section)]
            found = stage.compress(opened, [folds[i] for i in places])
            for place, (t, line) in zip(places, found, strict=True):
                chosen[place], told[place] = t, {**_describe(folds[place]), **line}
    order = range(len(folds))
    factors = make_factors(graph, [chosen[i] for i in order], folds)
    return Calibrated(factors, [told[i] for i in order], stage.told)


def inner_folds(folds: Sequence[Fold], sections: Sections) -> tuple[Fold, ...]:
    """The folds whose weights are all in one section."""
    return tuple(fold for fold in folds if any(_inside(fold, section) for section in sections.parts[1:]))


def _inside(fold: Fold, section: Section) -> bool:
    return {*fold.readers, *([fold.writer] if fold.writer else [])} <= {layer.name for layer in section.layers}


def _describe(fold: Fold) -> dict[str, Any]:
    """A fold for the report."""
    source = fold.writer or ("norm" if fold.behind is None else "norm without a weight")
    return {"from": source, "into": list(fold.readers), "channels": int(fold.free.sum())}


class _Stage:
    def __init__(self, graph: ModelGraph, plan: Plan, put: Put) -> None:
        self.graph, self.plan, self.put = graph, plan, put
        self.schemes = {entry.name: entry.scheme for entry in plan.layers}
        self.told: dict[str, dict[str, Any]] = {}

    def first_weights(self, sections: Sections, used: NDArray[np.int64]) -> dict[str, NDArray[np.float32]]:
        """Of the embedding only the rows of tokens that occur."""
        found = {}
        for layer in sections.parts[0].layers:
            if layer is sections.embedding:
                found[layer.name] = np.concatenate([np.asarray(self.graph.rows(layer, i, i + 1), np.float32) for i in used.tolist()])
            else:
                found[layer.name] = self._read(layer)
        return found

    def compress(self, opened: OpenSection, folds: Sequence[Fold]) -> list[tuple[NDArray[np.float32], dict[str, Any]]]:
        """Compress a section and push the hidden states through it; returns factors and a line for each fold."""
        section = opened.section
        weights = {layer.name: self._read(layer) for layer in section.layers}
        statistics = opened.observe(weights)
        hessians = {name: s.second_moment for names, s in zip(section.sites, statistics, strict=True) for name in names}
        del statistics
        found = [self._factors(fold, weights, hessians) for fold in folds]
        factors = make_factors(self.graph, [t for t, _ in found], folds)
        for layer in section.layers:
            if self.schemes[layer.name].is_calibrated and layer.name in hessians:
                weights[layer.name] = self._compress(layer, weights[layer.name], hessians[layer.name], factors)
        if not section.last:
            opened.advance(weights)
        return found

    def _read(self, layer: Layer) -> NDArray[np.float32]:
        rows = int(np.prod(layer.shape[:-1]))
        return np.asarray(self.graph.rows(layer, 0, rows), np.float32).reshape(layer.shape)

    def _factors(
        self, fold: Fold, weights: Mapping[str, NDArray[np.float32]], hessians: Mapping[str, NDArray[np.float32]]
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        names = [name for name in fold.readers if name in hessians]
        if self.plan.folds != "awq" or not names:
            sums = [(*equalize.magnitudes([weights[name][_spread(len(weights[name]))]]), fold.readers[name]) for name in names]
            return equalize.channel_factors(fold.channels, sums, fold.free), {}
        readers = []
        for name in names:
            w, scheme = weights[name], self.schemes[name]
            picked = np.ascontiguousarray(w[_spread(len(w))])
            readers.append(awq.Reader(picked, hessians[name], fold.readers[name], len(w) / len(picked), partial(_roundtrip, scheme)))
        t, (alpha, beta) = awq.choose_factors(fold.channels, readers, fold.free)
        return t, {"alpha": alpha, "beta": beta}

    def _compress(self, layer: Layer, w: NDArray[np.float32], hessian: NDArray[np.float32], factors: Factors) -> NDArray[np.float32]:
        """Compress one layer and hand it on; returns what it is now, without the factors."""
        started = time.perf_counter()
        scheme = self.schemes[layer.name]
        columns = factors.columns.get(layer.name, np.ones(w.shape[1], np.float32))
        scale_rows = factors.rows.get(layer.name, np.ones(len(w), np.float32))
        folded = w * columns * scale_rows[:, None]
        h = hessian / np.outer(columns, columns)
        weight = _solve(scheme, folded, h)
        plain = _quantize(scheme, folded, None)
        back = weight.stored().dequantize()
        loss, plain_loss = (float(quadratic_loss(x - folded, h).sum()) for x in (back, plain.stored().dequantize()))
        if loss > plain_loss:
            weight, back = plain, plain.stored().dequantize()
        power = float(quadratic_loss(folded, h).sum())
        error = float(np.square(back - folded, dtype=np.float64).sum()) / max(float(np.square(folded, dtype=np.float64).sum()), 1e-30)
        self.put(layer, weight, error, time.perf_counter() - started)
        self.told[layer.name] = {
            "output_error": min(loss, plain_loss) / max(power, 1e-30),
            "plain_error": plain_loss / max(power, 1e-30),
            "kept": "plain" if loss > plain_loss else "calibrated",
        }
        return back / columns / scale_rows[:, None]


def _spread(rows: int) -> NDArray[np.int64]:
    """Evenly spaced rows."""
    return np.unique(np.linspace(0, rows - 1, min(rows, SAMPLED_ROWS)).astype(np.int64))


def _roundtrip(scheme: Scheme, w: NDArray[np.float32], h: NDArray[np.float32]) -> NDArray[np.float32]:
    rule: Any = RULES.get(scheme.rule, scheme.rule)
    return kernels.roundtrip_rows(
        formats.get(scheme.format), w, scheme.group_size, rule, Given(importance=np.ascontiguousarray(h, np.float32))
    )


def _quantize(scheme: Scheme, w: NDArray[np.float32], h: NDArray[np.float32] | None) -> CompressedWeight:
    """Nearest codes; the scheme's own rule with `h`, the format's without."""
    fmt = formats.get(scheme.format)
    if h is None:
        return formats.quantize(fmt, w, scheme.group_size, fmt.best_rule)
    rule: Any = RULES.get(scheme.rule, scheme.rule)
    tile = kernels.quantize_rows(fmt, w, scheme.group_size, rule, Given(importance=h))
    return _unpacked(fmt, w.shape, scheme, tile)


def _unpacked(fmt: formats.Format, shape: tuple[int, ...], scheme: Scheme, tile: kernels.Tile) -> CompressedWeight:
    grouped = formats.grouped_shape(shape, scheme.group_size)
    zero_point = None
    if tile.zero_point is not None:
        zero_point = formats.unpack(tile.zero_point, str(fmt.zero_point_type), (*grouped[:-1], 1))
    codes = formats.unpack(tile.codes, fmt.code_type, grouped)
    return CompressedWeight(fmt, shape, scheme.group_size, codes, tile.scale, zero_point, scheme.rule)


def _solve(scheme: Scheme, w: NDArray[np.float32], hessian: NDArray[np.float32]) -> CompressedWeight:
    return _quantize(scheme, w, np.ascontiguousarray(np.diagonal(hessian)))
