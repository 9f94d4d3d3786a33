"""Measuring, the stage that finds out what each layer suffers from few bits.

comes in: a graph, token rows, candidate schemes
goes out: Measured: scores by NNCF's metrics, predicted losses in nats per token
may import: algorithms, calibration, graph, planning, solving
read first: measure

A layer's loss under a scheme is taken as c tr(D H D^T), D the rounding error and H the second moment of its inputs: what its outputs are off
by, and c what that costs at the model's end. c is measured: hidden states behind the layers of one site, rounded at their first candidate, go
on through the float model as streams beside its own, and their KL is shared out among these layers by how much each alone moves the block's
output. One more stream has everything rounded, for what the sum of all does not say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp import planning
from llmcomp.algorithms import sensitivity
from llmcomp.algorithms.awq import quadratic_loss
from llmcomp.algorithms.divergence import Divergence, LogSum
from llmcomp.calibration import Samples
from llmcomp.calibration.runner import BATCH_TOKENS, OpenSection, Runner, first_weights
from llmcomp.calibration.statistics import Activity, SiteStatistics
from llmcomp.errors import CalibrationError
from llmcomp.graph.layer import Layer
from llmcomp.graph.model import ModelGraph, flat_rows
from llmcomp.graph.sections import Section, divide
from llmcomp.planning import Measured, MeasuredLayer, Scheme
from llmcomp.solving import roundtrip

SAMPLED_ROWS, SAMPLED_RUN = 1024, 32
"""Rows of a weight by which candidates are compared, and how many of them lie together."""
HEAD_ROWS = 4096
"""Tokens of the vocabulary whose logits are computed together."""
WHOLE_TOKENS = 256
"""Tokens that go through the model together where logits come for the whole vocabulary at once."""
Hidden = list[NDArray[np.float32]]
Weights = dict[str, NDArray[np.float32]]
Check = Callable[[Layer, NDArray[Any]], None]
"""Raises NonFiniteWeightError if a layer's rows hold NaN or Inf."""


@dataclass
class _Change:
    """One use of a layer: its rounding errors at the output, and how far the first candidate moves what its section gives."""

    layer: Layer
    losses: dict[Scheme, float]
    moved: float = 1.0


@dataclass
class _Stream:
    """Hidden states of the first batches behind some rounded layers."""

    changes: list[_Change]
    hidden: Hidden
    weights: Weights = field(default_factory=dict)
    """Weights of the last section that are not the float ones."""
    head: bool = False
    """Whether the layer of the logits is rounded."""
    nats: float = 0.0


def measure(
    graph: ModelGraph,
    samples: Samples,
    schemes: Sequence[Scheme],
    tokens: int,
    check: Check,
    scratch: Path,
    advance: Callable[[int], None],
) -> tuple[Measured, list[str]]:
    """Scores of all layers, and the losses of those that are seen under the schemes that fit them, the first being tried for real; with no schemes
    only statistics are collected. And warnings.

    Statistics are of all rows; KL is of the first batches that hold `tokens`. `advance` is told numbers of weights as they are done.

    Raises:
        NonFiniteWeightError: a weight holds NaN or Inf, by `check`.
        CalibrationError: the float model's own figures are not finite.
    """
    sections = divide(graph, lambda layer: "MatMul" in layer.ops and len(layer.shape) == 2, logits=True)
    candidates = {layer.name: planning.fitting(layer, schemes) for layer in graph.layers}
    tokens = tokens if schemes else 0
    step = BATCH_TOKENS if sections.parts[-1].any_rows else WHOLE_TOKENS
    copies = 2 + sum(len(section.sites) for section in sections.parts) if schemes else 1
    with Runner(sections, samples.rows, scratch, min(step, tokens or step), copies) as runner:
        work = _Work(graph, runner, candidates, tokens, check)
        work.start()
        advance(sum(layer.size for layer in sections.parts[0].layers))
        for section in sections.parts[1:]:
            opened = runner.open(section)
            if section.last:
                work.end(opened)
            else:
                work.block(opened)
            advance(sum(layer.size for layer in section.layers if layer not in sections.parts[0].layers))
        work.score_unseen()
        nats, interaction = work.losses()
    told = [f"measured in one pass over the whole model, in memory: {sections.undivided}"] if sections.undivided else []
    unseen = [layer.name for layer in graph.layers if schemes and candidates[layer.name] and layer.name not in nats]
    if unseen:
        told.append(f"{len(unseen)} layers have no loss, {unseen[0]} for one: what they read is not seen block by block")
    lines = tuple(
        MeasuredLayer(
            name=layer.name,
            tensor=layer.tensor,
            shape=layer.shape,
            metrics={name: _short(score) for name, score in work.metrics[layer.name].items()},
            nats={planning.candidate(x.format, x.group_size): _short(loss) for x, loss in nats.get(layer.name, {}).items()},
        )
        for layer in graph.layers
    )
    return Measured(
        data=str(samples),
        weights=graph.checkpoint.values_digest(),
        tokens=work.tokens if schemes else samples.tokens,
        interaction=_short(interaction),
        layers=lines,
    ), told


class _Work:
    def __init__(self, graph: ModelGraph, runner: Runner, candidates: Mapping[str, Sequence[Scheme]], tokens: int, check: Check) -> None:
        self.graph, self.runner, self.candidates, self.check = graph, runner, candidates, check
        sizes = np.cumsum([batch.size for batch in runner.batches])
        self.probed = int(np.searchsorted(sizes, min(tokens, sizes[-1]))) + 1 if tokens else 0
        """How many batches the streams have."""
        self.tokens = int(sizes[self.probed - 1]) if self.probed else 0
        self.streams: list[_Stream] = []
        self.all: _Stream | None = None
        self.metrics: dict[str, dict[str, float]] = {}

    def read(self, layer: Layer) -> NDArray[np.float32]:
        rows = self.graph.rows(layer, 0, flat_rows(layer))
        self.check(layer, rows)
        return np.asarray(rows, np.float32).reshape(layer.shape)

    def start(self) -> None:
        """The tables, whose errors reach the hidden states as they are."""
        runner, tables = self.runner, self.runner.sections.parts[0].layers
        used = runner.used_ids()
        weights = first_weights(self.graph, runner.sections, used, self.read)
        runner.start(weights)
        rounded: Weights = {}
        for layer in tables:
            schemes = self.candidates.get(layer.name, ())
            if schemes:
                counts = self._counts(used) if layer is runner.sections.embedding else np.ones(len(weights[layer.name]))
                ones = np.ones(layer.shape[-1], np.float32)
                back = {scheme: roundtrip(scheme, weights[layer.name], ones) for scheme in schemes}
                losses = {x: float(counts @ np.square(b - weights[layer.name], dtype=np.float64).sum(-1)) for x, b in back.items()}
                rounded[layer.name] = back[schemes[0]]
                hidden = runner.embedded({**weights, layer.name: rounded[layer.name]}, self.probed)
                self.streams.append(_Stream([_Change(layer, losses)], hidden))
        if self.probed:
            self.all = _Stream([], runner.embedded({**weights, **rounded}, self.probed))

    def block(self, opened: OpenSection) -> None:
        section, runner = opened.section, self.runner
        weights = {layer.name: self.read(layer) for layer in section.layers}
        before = [x.copy() for x in runner.hidden[: self.probed]]
        seen = _by_layer(section, opened.observe(weights, advance=True))
        self._score(section.layers, seen, weights)
        if not self.probed:
            return
        for stream in self.streams:
            opened.push(weights, stream.hidden)
        changes, rounded = self._changes(section.layers, seen, weights)
        for names in section.sites:
            group = [changes[name] for name in names if name in changes]
            for change in group if len(group) > 1 else ():
                alone = opened.outputs({**weights, change.layer.name: rounded[change.layer.name]}, before)
                change.moved = sum(_squares(x[0] - y) for x, y in zip(alone, runner.hidden, strict=False))
            if group:
                hidden = opened.pushed({**weights, **{c.layer.name: rounded[c.layer.name] for c in group}}, before)
                self.streams.append(_Stream(group, hidden))
        assert self.all is not None
        opened.push({**weights, **rounded}, self.all.hidden)

    def end(self, opened: OpenSection) -> None:
        """The last section, whose own layers are tried one by one, and KL of all streams."""
        section, head = opened.section, opened.section.head
        assert head is not None
        weights = {layer.name: self.read(layer) for layer in section.layers if layer is not head or not section.any_rows}
        # Statistics are of what the layers read: one product is enough.
        one = weights if not section.any_rows else {**weights, head.name: np.asarray(self.graph.rows(head, 0, 1), np.float32)}
        seen = _by_layer(section, opened.observe(one))
        self._score(section.layers, seen, weights)
        if not self.probed:
            return
        changes, rounded = self._changes(section.layers, seen, weights)
        final = self.runner.hidden[: self.probed]
        for name, change in changes.items():
            self.streams.append(_Stream([change], final, {name: rounded[name]} if name in rounded else {}, change.layer is head))
        assert self.all is not None
        self.all.weights, self.all.head = rounded, head.name in changes
        importance = np.diagonal(seen[head.name].second_moment) if head.name in changes else None
        self._diverge(opened, weights, importance, [*self.streams, self.all])

    def _diverge(self, opened: OpenSection, weights: Weights, importance: NDArray[np.float32] | None, streams: Sequence[_Stream]) -> None:
        """KL of each stream to the float model, a part of the vocabulary at a time."""
        head = opened.section.head
        assert head is not None
        final = self.runner.hidden[: self.probed]
        shapes = [batch.size for batch in self.runner.batches[: self.probed]]
        true, divergences = [LogSum(n) for n in shapes], [[Divergence(n) for n in shapes] for _ in streams]
        for rows in self._head_rows(opened.section, weights):
            scheme = self.candidates[head.name][0] if importance is not None else None
            given = {False: {**weights, head.name: rows}}
            if importance is not None and scheme is not None:
                given[True] = {**weights, head.name: roundtrip(scheme, rows, importance)}
            z = [_flat(outputs[0]).copy() for outputs in opened.outputs(given[False], final)]
            terms = [logsum.add(x) for logsum, x in zip(true, z, strict=True)]
            for stream, found in zip(streams, divergences, strict=True):
                own = {**given[stream.head], **{n: w for n, w in stream.weights.items() if n != head.name}}
                for place, outputs in enumerate(opened.outputs(own, stream.hidden)):
                    found[place].add(terms[place], z[place], _flat(outputs[0]))
        for stream, found in zip(streams, divergences, strict=True):
            stream.nats = float(np.concatenate([d.nats(p) for d, p in zip(found, true, strict=True)]).mean())

    def _head_rows(self, section: Section, weights: Weights) -> Iterator[NDArray[np.float32]]:
        head = section.head
        assert head is not None
        if not section.any_rows:
            yield weights[head.name]
            return
        yield from (np.asarray(rows, np.float32) for rows in self._tiles(head))

    def _changes(self, layers: Sequence[Layer], seen: Mapping[str, SiteStatistics], weights: Weights) -> tuple[dict[str, _Change], Weights]:
        """Each layer with candidates: its losses; and those of `weights` rounded at the first of them."""
        changes: dict[str, _Change] = {}
        rounded: Weights = {}
        for layer in layers:
            schemes = self.candidates.get(layer.name, ())
            if not schemes or layer.name not in seen:
                continue
            hessian = seen[layer.name].second_moment
            importance = np.diagonal(hessian)
            w = weights.get(layer.name)
            sample = np.concatenate(list(_sampled(layer, w, self.graph)))
            losses = {x: float(quadratic_loss(roundtrip(x, sample, importance) - sample, hessian).sum()) for x in schemes}
            changes[layer.name] = _Change(layer, losses)
            if w is not None:
                rounded[layer.name] = roundtrip(schemes[0], w, importance)
        return changes, rounded

    def _score(self, layers: Sequence[Layer], seen: Mapping[str, SiteStatistics], weights: Weights) -> None:
        for layer in layers:
            if layer.name not in seen:
                continue
            w = weights.get(layer.name)
            error = sensitivity.int8_error([w] if w is not None else self._tiles(layer))
            self.metrics[layer.name] = sensitivity.scores(error, **seen[layer.name].activity.means())

    def _tiles(self, layer: Layer) -> Iterator[NDArray[Any]]:
        for start in range(0, flat_rows(layer), HEAD_ROWS):
            rows = self.graph.rows(layer, start, min(start + HEAD_ROWS, flat_rows(layer)))
            self.check(layer, rows)
            yield rows

    def _counts(self, used: NDArray[np.int64]) -> NDArray[np.float64]:
        """How often each used token occurs."""
        ids = np.concatenate([batch.reshape(-1) for batch in self.runner.batches])
        return np.bincount(np.searchsorted(used, ids), minlength=len(used)).astype(np.float64)

    def score_unseen(self) -> None:
        """Layers that nothing is known of but their weights. Of a table NNCF ranks everything else before it, if data is to have a say."""
        for layer in self.graph.layers:
            if layer.name not in self.metrics:
                error = sensitivity.int8_error(self._tiles(layer))
                table = sensitivity.scores(error, **Activity().means())
                own = {"weight_quantization_error": sensitivity.weight_quantization_error(error)}
                self.metrics[layer.name] = table if "MatMul" not in layer.ops else own

    def losses(self) -> tuple[dict[str, dict[Scheme, float]], float]:
        """Layer name -> scheme -> nats, and the interaction factor."""
        found: dict[str, dict[Scheme, float]] = {}
        base = 0.0
        for stream in self.streams:
            whole = sum(change.moved for change in stream.changes)
            for change in stream.changes:
                first = next(iter(change.losses.values()))
                own = stream.nats * change.moved / whole if whole > 0 else 0.0
                base += own
                # A table that is the last layer, too, has two uses, whose losses add up.
                nats = found.setdefault(change.layer.name, dict.fromkeys(change.losses, 0.0))
                for scheme, loss in change.losses.items():
                    nats[scheme] += own * loss / first if first > 0 else 0.0
        together = self.all.nats if self.all is not None else 0.0
        if not np.isfinite(base + together):
            raise CalibrationError(
                "the KL of rounded layers", "it is not finite", "Judge the float model with `llmcomp eval`; it may be broken"
            )
        return found, together / base if base > 0 and together > 0 else 1.0


def _by_layer(section: Section, statistics: Sequence[SiteStatistics]) -> dict[str, SiteStatistics]:
    return {name: s for names, s in zip(section.sites, statistics, strict=True) for name in names}


def _sampled(layer: Layer, w: NDArray[np.float32] | None, graph: ModelGraph) -> Iterator[NDArray[np.float32]]:
    """Evenly spaced runs of rows of a weight that is in memory or not."""
    rows = flat_rows(layer)
    runs = -(-min(SAMPLED_ROWS, rows) // SAMPLED_RUN)
    for start in sorted({i * rows // runs for i in range(runs)}):
        stop = min(start + SAMPLED_RUN, rows, start + rows // runs)
        yield w[start:stop] if w is not None else np.asarray(graph.rows(layer, start, stop), np.float32)


def _flat(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """[tokens, part]."""
    return logits.reshape(-1, logits.shape[-1])


def _short(number: float) -> float:
    """To digits that mean something, for readers."""
    return float(f"{number:.5g}")


def _squares(x: NDArray[np.float32]) -> float:
    return float(np.square(x, dtype=np.float64).sum())
