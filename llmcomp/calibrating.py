"""Calibration, the stage that compresses block by block what data is to have a say in.

comes in: a graph, a plan, its folds, token rows
goes out: Factors for all folds, and each calibrated layer compressed, handed on as soon as it is ready
may import: adapting, algorithms, calibration, errors, fitting, formats, graph, planning, solving, threads
read first: this file, then calibration/runner.py
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmcomp import formats
from llmcomp.adapting import Stored, correct
from llmcomp.algorithms import awq, equalize, target
from llmcomp.calibration.experts import Experts, Routed, gather, routed_to, spread
from llmcomp.calibration.runner import Runner, first_weights
from llmcomp.calibration.segmented import SegmentedSection, Stream
from llmcomp.calibration.statistics import SiteStatistics
from llmcomp.errors import CalibrationError
from llmcomp.fitting import fit_table
from llmcomp.formats import ADAPTIVE, CompressedWeight
from llmcomp.graph.factors import NO_FACTORS, Factors, make_factors
from llmcomp.graph.folds import Fold
from llmcomp.graph.layer import Layer
from llmcomp.graph.model import ModelGraph, flat_rows
from llmcomp.graph.sections import Section, Sections
from llmcomp.planning import Plan, Scheme, adapters
from llmcomp.solving import TINY, Moments, errors, second_order_errors, solve
from llmcomp.threads import Threads

TARGET_ROWS = 256
"""Rows whose targets are solved for together."""
FOLD_TOKENS = 2048
"""Tokens by which AWQ chooses factors where layers are compressed in turn, or as many as a site has inputs: all would cost a second pass."""
LEAST_TOKENS = 64
"""Tokens below which an expert's own say too little of its inputs."""
KEEP_SECONDS = 10.0
"""Between two times that the state is kept: small blocks are computed faster than their hidden states are written."""
SAMPLED_ROWS = 64
"""Rows of a weight by which the factors of a fold are chosen."""
Check = Callable[[Layer, NDArray[Any]], None]
"""Raises NonFiniteWeightError if a layer's rows hold NaN or Inf."""
Put = Callable[[Layer, Stored, float, float], None]
"""(layer or adapter, its compressed weight with f32 scales or its float rows, relative squared error of its weights, seconds)."""


class Keeper(Protocol):
    """Where the state between two sections is kept: their number, values as JSON has them, and arrays."""

    def reached(self) -> int: ...
    def state(self) -> dict[str, Any] | None: ...
    def keep_state(self, number: int, values: Mapping[str, Any], arrays: Mapping[str, Sequence[NDArray[np.float32]]]) -> None: ...


Keep = Callable[[str, CompressedWeight, tuple[float, float], float, dict[str, Any]], None]
"""(layer, its compressed weight, squares of its error and of itself, seconds, a line for the report)."""
Chosen = tuple[NDArray[np.float32], dict[str, Any]]
"""Factors of a fold and what the report says of them."""


@dataclass
class Calibrated:
    """What came of it."""

    factors: Factors
    folds: list[dict[str, Any]]
    """A line for the report on each fold."""
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Layer name -> loss: mean squared error of its outputs relative to their power; plain_loss: that of plain rounding; kept: which was taken; of groups
    whose weights are below the least step of a scale: faded, their share of the weight's squares, and faded_groups, how many."""
    unmoved: list[str] = field(default_factory=list)
    """Layers that have read nothing but zeros: the data says nothing of them."""


def calibrate(
    graph: ModelGraph,
    plan: Plan,
    folds: Sequence[Fold],
    sections: Sections,
    rows: Sequence[NDArray[np.int64]],
    put: Put,
    check: Check,
    scratch: Path,
    keeper: Keeper,
) -> Calibrated:
    """Compress the layers that the plan wants calibrated, in the order of the graph.

    With second-order rounding each layer sees what comes out of the layers before it, compressed as they will be, else what the float
    model would have given it. `folds` are those of `inner_folds`. Where it stands is kept between sections, and gone on from if there is such a
    state, which then speaks for all layers of the sections that it has behind it.

    Raises:
        NonFiniteWeightError: a weight holds NaN or Inf, by `check`.
        CalibrationError: what a layer reads is beyond float32.
    """
    chosen: dict[int, NDArray[np.float32]] = {}
    told: dict[int, dict[str, Any]] = {}
    with Threads() as threads, Runner(sections, rows, scratch, threads=threads) as runner:
        stage = _Stage(graph, plan, sections, put, check, threads)
        state, first = keeper.state(), keeper.reached() + 1
        if state is None:
            runner.start(first_weights(graph, sections, runner.used_ids(), stage.read))
            stage.floats = runner.hidden
        else:
            runner.hidden, stage.floats = ([runner.keep(x) for x in state[name]] for name in ("hidden", "floats"))
            chosen.update(zip(state["places"], state["factors"], strict=True))
            told.update(zip(state["places"], state["lines"], strict=True))
            stage.told, stage.unmoved = state["layers"], state["unmoved"]
        kept = time.monotonic()
        for number, section in enumerate(sections.parts[1:]):
            if number < first:
                continue
            places = [i for i, fold in enumerate(folds) if _inside(fold, section)]
            found = (stage.compress_in_turn if stage.second_order else stage.compress)(runner, section, [folds[i] for i in places])
            for place, (t, line) in zip(places, found, strict=True):
                chosen[place], told[place] = t, {**_describe(folds[place]), **line}
            if time.monotonic() - kept >= KEEP_SECONDS:
                values = {"places": [*chosen], "lines": [told[i] for i in chosen], "layers": stage.told, "unmoved": stage.unmoved}
                floats = stage.floats if plan.target_correction else []
                keeper.keep_state(number, values, {"hidden": runner.hidden, "floats": floats, "factors": [*chosen.values()]})
                kept = time.monotonic()
    order = range(len(folds))
    factors = make_factors(graph, [chosen[i] for i in order], folds)
    return Calibrated(factors, [told[i] for i in order], stage.told, stage.unmoved)


def input_power(
    graph: ModelGraph, plan: Plan, sections: Sections, rows: Sequence[NDArray[np.int64]], check: Check, scratch: Path
) -> dict[str, NDArray[np.float32]]:
    """Layer name -> the second moment of each of its inputs [in] in the float model, in a pass of its own over the data.

    Raises:
        NonFiniteWeightError: a weight holds NaN or Inf, by `check`.
    """
    found: dict[str, NDArray[np.float32]] = {}
    with Threads() as threads, Runner(sections, rows, scratch, threads=threads) as runner:
        stage = _Stage(graph, plan, sections, lambda *_: None, check, threads)
        runner.start(first_weights(graph, sections, runner.used_ids(), stage.read))
        for section in sections.parts[1:]:
            statistics = runner.open(section).observe(stage.read_all(section), advance=True, moments_only=True)
            for names, one in zip(section.sites, statistics, strict=True):
                found |= dict.fromkeys(names, np.diagonal(one.second_moment).copy())
    return found


def inner_folds(folds: Sequence[Fold], sections: Sections) -> tuple[Fold, ...]:
    """The folds whose weights are all in one section."""
    return tuple(fold for fold in folds if any(_inside(fold, section) for section in sections.parts[1:]))


def _inside(fold: Fold, section: Section) -> bool:
    return {*fold.readers, *([fold.writer] if fold.writer else [])} <= {layer.name for layer in section.layers}


def _describe(fold: Fold) -> dict[str, Any]:
    """A fold for the report."""
    return {"from": fold.source, "into": list(fold.readers), "channels": int(fold.free.sum())}


class _Stage:
    def __init__(self, graph: ModelGraph, plan: Plan, sections: Sections, put: Put, check: Check, threads: Threads) -> None:
        self.graph, self.plan, self.put, self.check, self.threads = graph, plan, put, check, threads
        self.schemes = plan.schemes
        self.seen = {name for section in sections.parts for names in section.sites for name in names}
        """Layers that read a site."""
        self.told: dict[str, dict[str, Any]] = {}
        self.unmoved: list[str] = []
        """Layers that have read nothing but zeros."""
        self.second_order = any(scheme.rounding == "gptq" for scheme in self.schemes.values())
        """Only then layers are given what the layers before them have become."""
        self.floats: list[NDArray[np.float32]] = []
        """The hidden states of the float model in front of a section."""

    def compress(self, runner: Runner, section: Section, folds: Sequence[Fold]) -> list[Chosen]:
        """Compress a section for inputs of the float model, and push these through it; returns factors and a line for each fold."""
        weights = self.read_all(section)
        if section.mixture is not None:
            hessians = self._observe_in_turn(runner, section, weights)
        else:
            hessians = _by_layer(section.sites, runner.open(section).observe(weights, advance=True, moments_only=True))
        found, factors = self._choose(folds, weights, hessians)
        by_name = {layer.name: layer for layer in section.layers}
        for names in section.sites:
            hessian = hessians[names[0]]
            for name in names:
                del hessians[name]
            self._compress_site(self._asked(names, by_name), weights, hessian, factors)
        return found

    def _observe_in_turn(
        self, runner: Runner, section: Section, weights: Mapping[str, NDArray[np.float32]]
    ) -> dict[str, NDArray[np.float32]]:
        """Push the float hidden states through a section, from site to site, its experts compressed on the way; H of each layer."""
        opened, stream = SegmentedSection(runner, section), Stream(runner.hidden)
        found: dict[str, NDArray[np.float32]] = {}
        opened.advance(0, stream, weights)
        for site, names in enumerate(opened.sites):
            if opened.has_experts(site):
                opened.give(stream, self._compress_experts(opened.routed(site, stream), section))
            else:
                found |= dict.fromkeys(names, opened.moments(site, stream))
            opened.advance(site + 1, stream, weights)
        if not section.last:
            runner.hidden = opened.out(stream)
        return found

    def compress_in_turn(self, runner: Runner, section: Section, folds: Sequence[Fold]) -> list[Chosen]:
        """As `compress`, for inputs that the layers before have given as they are after compression, in this section, too."""
        weights, by_name = self.read_all(section), {layer.name: layer for layer in section.layers}
        opened, stream = SegmentedSection(runner, section), Stream(runner.hidden)
        asked = folds if self.plan.folds == "awq" else []
        found, factors = self._choose(
            folds, weights, opened.observe(weights, FOLD_TOKENS, partial(self._float_experts, section=section)) if asked else {}
        )
        floats = Stream(self.floats) if self.plan.target_correction else None
        for one in (stream, floats):
            if one is not None:
                opened.advance(0, one, weights)
        for site, names in enumerate(opened.sites):
            if opened.has_experts(site):
                opened.give(stream, self._compress_experts(opened.routed(site, stream), section))
                if floats is not None:
                    opened.give(floats, self._float_experts(opened.routed(site, floats), section))
                    opened.advance_floats(site + 1, floats, stream, weights)
                opened.advance(site + 1, stream, weights)
                continue
            hessian, pulls = opened.moments(site, stream), {}
            if floats is not None:
                pulls = self._pulls(opened, site, floats, stream, weights)
            weights |= self._compress_site(self._asked(names, by_name), weights, hessian, factors, pulls)
            opened.advance(site + 1, stream, weights)
        if not section.last:
            runner.hidden = opened.out(stream)
            if floats is not None:
                self.floats = opened.out(floats)
        return found

    def _pulls(
        self, opened: SegmentedSection, site: int, floats: Stream, stream: Stream, weights: Mapping[str, NDArray[np.float32]]
    ) -> dict[str, NDArray[np.float32]]:
        """What the outputs of a site's layers should make up for, P of `algorithms.target`; the float model passes the layers."""
        alone = [name for name in opened.alone(site) if self.schemes[name].is_calibrated]
        pulls = {}
        if alone:
            drift = opened.drift(site, floats, stream)
            pulls = {name: weights[name] @ drift for name in alone}
        return pulls | opened.advance_floats(site + 1, floats, stream, weights)

    def _asked(self, names: Sequence[str], by_name: Mapping[str, Layer]) -> list[Layer]:
        return [by_name[name] for name in names if self.schemes[name].is_calibrated]

    def _choose(
        self, folds: Sequence[Fold], weights: Mapping[str, NDArray[np.float32]], hessians: Mapping[str, NDArray[np.float32]]
    ) -> tuple[list[Chosen], Factors]:
        # Layers of one site share their second moments, and the factors of these, which are made by all threads before these ask for them.
        sites = {id(h): Moments(h) for h in hessians.values()}
        for name, h in hessians.items():
            _check_inputs(name, h)
        moments = {name: sites[id(h)] for name, h in hessians.items()}
        for name, one in moments.items():
            if self.plan.folds == "awq" and self.schemes[name].rounding == "gptq":
                one.factor(self.schemes[name].group_size, "activation", self.threads.map)
        found = self.threads.map(lambda fold: self._factors(fold, weights, moments), folds)
        return found, make_factors(self.graph, [t for t, _ in found], folds)

    def read_all(self, section: Section) -> dict[str, NDArray[np.float32]]:
        return {layer.name: self.read(layer) for layer in section.layers}

    def read(self, layer: Layer) -> NDArray[np.float32]:
        rows = self.graph.rows(layer, 0, flat_rows(layer))
        self.check(layer, rows)
        return np.asarray(rows, np.float32).reshape(layer.shape)

    def _factors(
        self, fold: Fold, weights: Mapping[str, NDArray[np.float32]], moments: Mapping[str, Moments]
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        names = [name for name in fold.readers if name in self.seen]
        if self.plan.folds != "awq" or not names:
            sums = [(*equalize.magnitudes([weights[name][_spread(len(weights[name]))]]), fold.readers[name]) for name in names]
            return equalize.channel_factors(fold.channels, sums, fold.free), {}
        readers = []
        for name in names:
            w = weights[name]
            picked = np.ascontiguousarray(w[_spread(len(w))])
            quantizers = _quantizers(self.schemes[name], moments[name])
            readers.append(awq.Reader(picked, moments[name].hessian, fold.readers[name], len(w) / len(picked), *quantizers))
        quick = all(reader.quick_errors for reader in readers)
        grid, gain = (awq.GRID, 0.0) if quick else (awq.SECOND_ORDER_GRID, awq.SECOND_ORDER_GAIN)
        t, (alpha, beta) = awq.choose_factors(fold.channels, readers, fold.free, grid, gain)
        return t, {"alpha": alpha, "beta": beta}

    def _compress_site(
        self,
        layers: Sequence[Layer],
        weights: Mapping[str, NDArray[np.float32]],
        hessian: NDArray[np.float32],
        factors: Factors,
        pulls: Mapping[str, NDArray[np.float32]] = {},
        keep: Keep | None = None,
    ) -> dict[str, NDArray[np.float32]]:
        """Compress the layers that share a site and hand them on; returns what they are now, without the factors, if that is of use.

        `hessian` is that of the inputs with the factors in them afterwards: at thousands of channels a copy counts. `pulls`: what the
        outputs of the layers should make up for, P of `algorithms.target`. `keep` takes the results in place of the writer.
        """
        if not layers:
            return {}
        columns = factors.columns.get(layers[0].name, np.ones(len(hessian), np.float32))
        _check_inputs(layers[0].name, hessian)
        if not np.diagonal(hessian).any():
            self.unmoved += [layer.name for layer in layers]
        hessian /= columns
        hessian /= columns[:, None]
        moments, started = Moments(hessian), time.perf_counter()
        scale_rows = [factors.rows.get(layer.name, np.ones(len(weights[layer.name]), np.float32))[:, None] for layer in layers]
        wide = [weights[layer.name] * columns * rows for layer, rows in zip(layers, scale_rows, strict=True)]
        schemes = [self.schemes[layer.name] for layer in layers]
        for i, (scheme, w) in enumerate(zip(schemes, wide, strict=True)):
            if scheme.format == ADAPTIVE:
                schemes[i] = replace(scheme, format=fit_table(scheme, [(w, moments.diagonal)]))
        moved = [pulls[layer.name] * rows / columns for layer, rows in zip(layers, scale_rows, strict=True)] if pulls else []
        targets = self._targets(wide, moved, hessian)
        solved = solve(list(zip(schemes, wide, targets, strict=True)), moments, self.threads)
        seconds = (time.perf_counter() - started) / sum(layer.size for layer in layers)
        found: dict[str, NDArray[np.float32]] = {}
        for layer, w, aim, rows, one in zip(layers, wide, targets, scale_rows, solved, strict=True):
            back, told = one.back, one.told
            if self.schemes[layer.name].adapter_rank:
                back, told = self._correct(layer, aim, back, moments, told)
            squares = _square_sum(back - w), _square_sum(w)
            gone = formats.faded(w, one.weight.scale, one.weight.group_size)
            if gone.any():
                told = {
                    **told,
                    "faded": _square_sum(w.reshape(*gone.shape, -1)[gone]) / max(squares[1], TINY),
                    "faded_groups": int(gone.sum()),
                }
            if keep is not None:
                keep(layer.name, one.weight, squares, seconds * layer.size, told)
                found[layer.name] = back
                continue
            error = squares[0] / max(squares[1], TINY)
            self.put(layer, one.weight, error, seconds * layer.size)
            self.told[layer.name] = told
            if self.second_order:
                found[layer.name] = back / columns / rows
        return found

    def _compress_experts(self, batches: Sequence[Routed], section: Section) -> list[NDArray[np.float32]]:
        """Compress the experts of a section one after the other, each for the tokens that are routed to it; returns what they give each batch.

        An expert that few tokens reach is compressed for tokens of all kinds. With second-order rounding each stack sees what comes out of the
        compressed ones before it, and so does what follows.
        """
        mixture = section.mixture
        assert mixture is not None
        experts, by_name = Experts(mixture), {layer.name: layer for layer in mixture.stacks}
        made = {layer.name: _Stack() for layer in mixture.stacks if self._calibrates_stack(layer)}
        sums: list[NDArray[np.float32]] = []
        for expert in range(mixture.experts):
            weights = {layer.name: self._read_expert(layer, expert) for layer in mixture.stacks}
            chosen = routed_to(expert, batches)
            x = gather(batches, chosen)
            few = len(x) < LEAST_TOKENS
            seen = np.concatenate([batch.tokens for batch in batches])[:FOLD_TOKENS] if few else x
            now = dict(weights)
            for site, names in enumerate(mixture.sites):
                asked = [by_name[name] for name in names if name in made]
                if not asked:
                    continue
                # With second-order rounding the sites behind compressed stacks, else the float model's.
                given = experts.run(expert, now if self.second_order else weights, seen)[1][site]
                found = self._compress_site(
                    asked, weights, _second_moment(given), NO_FACTORS, keep=lambda name, *rest: made[name].add(*rest)
                )
                now |= found
            for name in made:
                made[name].count(len(x), few)
            y = experts.run(expert, now if self.second_order else weights, x)[0] if len(x) else np.zeros((0, 1), np.float32)
            if not sums and len(x):
                sums = [np.zeros((len(batch.tokens), y.shape[-1]), np.float32) for batch in batches]
            if len(x):
                spread(expert, batches, chosen, y, sums)
        for name, stack in made.items():
            weight, error, seconds, told = stack.joined()
            self.put(by_name[name], weight, error, seconds)
            self.told[name] = told
        return sums

    def _float_experts(self, batches: Sequence[Routed], section: Section) -> list[NDArray[np.float32]]:
        """What the experts of the float model give each batch."""
        mixture = section.mixture
        assert mixture is not None
        experts, sums = Experts(mixture), list[NDArray[np.float32]]()
        for expert in range(mixture.experts):
            chosen = routed_to(expert, batches)
            x = gather(batches, chosen)
            if len(x):
                y = experts.run(expert, {layer.name: self._read_expert(layer, expert) for layer in mixture.stacks}, x)[0]
                sums = sums or [np.zeros((len(batch.tokens), y.shape[-1]), np.float32) for batch in batches]
                spread(expert, batches, chosen, y, sums)
        return sums

    def _calibrates_stack(self, layer: Layer) -> bool:
        return self.schemes[layer.name].is_calibrated and self.schemes[layer.name].format != ADAPTIVE

    def _read_expert(self, layer: Layer, expert: int) -> NDArray[np.float32]:
        out = layer.shape[-2]
        rows = self.graph.rows(layer, expert * out, (expert + 1) * out)
        self.check(layer, rows)
        return np.asarray(rows, np.float32)

    def _targets(
        self, weights: Sequence[NDArray[np.float32]], pulls: Sequence[NDArray[np.float32]], hessian: NDArray[np.float32]
    ) -> Sequence[NDArray[np.float32]]:
        """What the weights of a site are to be rounded to: themselves, or with pulls what makes up for more than their own rounding."""
        factor = target.factorized(hessian) if pulls else None
        if factor is None:
            return weights
        parts = [(i, slice(start, start + TARGET_ROWS)) for i, w in enumerate(weights) for start in range(0, len(w), TARGET_ROWS)]
        moved = self.threads.map(lambda part: target.corrected(weights[part[0]][part[1]], pulls[part[0]][part[1]], factor), parts)
        return [np.concatenate([one for one, (k, _) in zip(moved, parts, strict=True) if k == i]) for i in range(len(weights))]

    def _correct(
        self, layer: Layer, w: NDArray[np.float32], back: NDArray[np.float32], moments: Moments, told: dict[str, Any]
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Hand a layer's adapters on; returns what the layer is with them, and the report's line."""
        started, scheme = time.perf_counter(), self.schemes[layer.name]
        found = correct(scheme, w, back, moments)
        for (adapter, _), weight in zip(adapters(layer, scheme), found.adapters, strict=True):
            self.put(adapter, weight, 0.0, time.perf_counter() - started)
        return back + found.product, {
            **told,
            "loss": found.loss,
            "rounded_loss": told["loss"],
            "adapters": "kept" if found.helps else "zeros",
        }


class _Stack:
    """The experts of one stack, as they are compressed."""

    def __init__(self) -> None:
        self.weights: list[CompressedWeight] = []
        self.told: list[dict[str, Any]] = []
        self.tokens: list[int] = []
        self.few: list[int] = []
        self.squares, self.seconds = np.zeros(2), 0.0

    def add(self, weight: CompressedWeight, squares: tuple[float, float], seconds: float, told: dict[str, Any]) -> None:
        self.weights.append(weight)
        self.told.append(told)
        self.squares += squares
        self.seconds += seconds

    def count(self, tokens: int, few: bool) -> None:
        self.few += [len(self.tokens)] if few else []
        self.tokens.append(tokens)

    def joined(self) -> tuple[CompressedWeight, float, float, dict[str, Any]]:
        """All experts below each other, the relative squared error of their weights, seconds, and a line for the report."""
        first = self.weights[0]
        parts = [(one.codes, one.scale, one.zero_point) for one in self.weights]
        codes, scale = (np.concatenate([part[i] for part in parts]) for i in range(2))
        zeros = None if first.zero_point is None else np.concatenate([part[2] for part in parts if part[2] is not None])
        shape = (len(codes), first.shape[1])
        kept = Counter(str(told["kept"]) for told in self.told)
        gone, groups = [told.get("faded", 0.0) for told in self.told], sum(told.get("faded_groups", 0) for told in self.told)
        told = {
            "loss": float(np.mean([told["loss"] for told in self.told])),
            "plain_loss": float(np.mean([told["plain_loss"] for told in self.told])),
            "kept": kept.most_common(1)[0][0],
            "experts_kept": dict(kept),
            "tokens": self.tokens,
            "few_tokens": self.few,
        } | ({"faded": float(np.mean(gone)), "faded_groups": groups} if groups else {})
        weight = replace(first, shape=shape, codes=codes, scale=scale, zero_point=zeros)
        return weight, float(self.squares[0] / max(self.squares[1], TINY)), self.seconds, told


def _square_sum(x: NDArray[np.float32]) -> float:
    found = float(np.vdot(x, x))
    if 1e-30 < found < 1e30:
        return found
    # Not within f32, or nothing at all.
    return float(sum(np.square(part, dtype=np.float64).sum() for part in x))


def _second_moment(x: NDArray[np.float32]) -> NDArray[np.float32]:
    statistics = SiteStatistics.empty(x.shape[-1])
    statistics.add_products(x)
    return statistics.take_second_moment()


def _by_layer(sites: Sequence[Sequence[str]], statistics: Sequence[SiteStatistics]) -> dict[str, NDArray[np.float32]]:
    return {name: h for names, one in zip(sites, statistics, strict=True) for h in [one.take_second_moment()] for name in names}


def _spread(rows: int) -> NDArray[np.int64]:
    """Evenly spaced rows."""
    return np.unique(np.linspace(0, rows - 1, min(rows, SAMPLED_ROWS)).astype(np.int64))


def _check_inputs(layer: str, hessian: NDArray[np.float32]) -> None:
    """Raises CalibrationError if squares of what a layer reads are beyond float32."""
    wrong = int((~np.isfinite(np.diagonal(hessian))).sum())
    if wrong:
        raise CalibrationError(
            layer,
            f"what it reads, squared, overflows float32 in {wrong} of {len(hessian)} channels",
            "Check the checkpoint: such numbers leave no room for the model's own sums",
        )


def _quantizers(scheme: Scheme, moments: Moments) -> tuple[awq.Errors, awq.Errors | None]:
    """By which factors are chosen: the one that will be used, and a quick one if that is slow and there is one like it."""
    factor = moments.factor(scheme.group_size, "activation") if scheme.rounding == "gptq" else None
    if factor is not None:
        return partial(second_order_errors, scheme, moments, factor), None
    nearest = partial(errors, scheme, moments)
    return nearest, partial(nearest, quick=True)
