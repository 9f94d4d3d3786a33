"""The block runner: token rows go through the model section by section, each with the weights that it is given.

Hidden states between two sections are kept in memory, or in a mapped file once they are large; never more than one section is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import groupby, islice
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from llmcomp.calibration.statistics import ALONE, SiteStatistics
from llmcomp.graph.layer import Layer
from llmcomp.graph.model import ModelGraph
from llmcomp.graph.sections import HIDDEN, WEIGHT, Section, Sections
from llmcomp.threads import Threads

PROPERTIES = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
BATCH_TOKENS = 2048
"""Tokens that go through a section together: enough for the matrix products to run at full speed."""
MAPPED_FROM = 32 << 20
"""Bytes of hidden states from which they lie in a file."""

Weights = Mapping[str, NDArray[np.float32]]
"""Layer name -> its matrix [out, in] (a stack of experts has leading axes)."""


class Runner(AbstractContextManager["Runner"]):
    """Rows on their way through the sections.

    For each section in turn: `open` compiles it, `observe` runs it and gives statistics, `advance` runs it and replaces the hidden states
    by what comes out. The first section, the embedding, is run by `start`.
    """

    def __init__(
        self,
        sections: Sections,
        rows: Sequence[NDArray[np.int64]],
        scratch: Path,
        batch_tokens: int = BATCH_TOKENS,
        copies: int = 1,
        threads: Threads = ALONE,
    ) -> None:
        """`copies` of the hidden states will be kept at a time, as far as memory is concerned."""
        self.sections, self.scratch, self.copies, self.threads = sections, scratch, copies, threads
        self.batches = list(_batches(rows, batch_tokens))
        self.hidden: list[NDArray[np.float32]] = []
        self._ambient = ov.Core().compile_model(sections.ambient, "CPU", PROPERTIES)
        self._known: dict[tuple[int, int], dict[str, ov.Tensor]] = {}
        self._files = 0

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.hidden.clear()

    @property
    def tokens(self) -> int:
        return sum(batch.size for batch in self.batches)

    def used_ids(self) -> NDArray[np.int64]:
        """The token ids that occur, sorted: rows of the table that `start` needs."""
        return np.unique(np.concatenate([batch.reshape(-1) for batch in self.batches]))

    def start(self, weights: Weights) -> None:
        """Run the first section. Of the embedding table `weights` holds the rows of `used_ids`."""
        self.hidden = self.embedded(weights, len(self.batches))

    def embedded(self, weights: Weights, count: int) -> list[NDArray[np.float32]]:
        """What the first section makes of the first `count` batches."""
        first, used = self.sections.parts[0], self.used_ids()
        request = ov.Core().compile_model(first.model, "CPU", PROPERTIES).create_infer_request()
        given = oriented(first.layers, weights)
        found = []
        for batch in self.batches[:count]:
            feed: dict[str, Any] = {
                port.get_any_name(): _model_input(port, batch.shape, np.searchsorted(used, batch))
                for port in first.model.inputs
                if not port.get_any_name().startswith(WEIGHT)
            }
            request.infer({**feed, **given}, share_inputs=True)
            found.append(self.keep(request.get_output_tensor(0).data))
        return found

    def open(self, section: Section) -> OpenSection:
        return OpenSection(self, section)

    def ambient(self, shape: tuple[int, int]) -> Mapping[str, ov.Tensor]:
        """Masks, rotary tables and the like, which only depend on the shape of a batch, since nothing is padded."""
        if shape not in self._known:
            # Of a batch's shape only one is kept: rows are sorted by length.
            self._known.clear()
            feed = {port.get_any_name(): _model_input(port, shape, None) for port in self._ambient.inputs}
            request = self._ambient.create_infer_request()
            request.infer(feed)
            self._known[shape] = {name: request.get_output_tensor(i) for i, name in enumerate(self.sections.ambient_names)}
        return self._known[shape]

    def keep(self, array: NDArray[Any]) -> NDArray[Any]:
        """A copy of a batch's hidden states, in memory or in a file."""
        if self.copies * self.tokens * array.shape[-1] * 4 < MAPPED_FROM:
            return array.copy()
        path = self.scratch / f"hidden-{self._files}.bin"
        # Written, not mapped and filled: on a full disk that would be a signal, which ends the process, and no error.
        with path.open("wb") as file:
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        kept = np.memmap(path, array.dtype, "r+", shape=array.shape)
        self._files += 1
        # The file is gone with the mapping, where the system allows that; else with the folder.
        with suppress(OSError):
            path.unlink()
        return kept


class OpenSection:
    """A compiled section and the hidden states in front of it."""

    def __init__(self, runner: Runner, section: Section) -> None:
        self.runner, self.section = runner, section
        self._request = ov.Core().compile_model(runner.sections.with_stacks(section.model), "CPU", PROPERTIES).create_infer_request()
        self._sites_from = 0 if section.last and section.head is None else 1
        self._flat = len(section.model.input(HIDDEN).get_partial_shape()) == 2
        self._inputs = {port.get_any_name() for port in section.model.inputs}

    def observe(self, weights: Weights, advance: bool = False, moments_only: bool = False) -> list[SiteStatistics]:
        """Statistics of each site, with these weights in the section; and `advance` in the same pass.

        `moments_only`: of the statistics only tokens and second moments, which is all that compression asks for.
        """
        found: list[SiteStatistics] = []
        for place, outputs in enumerate(self.outputs(weights, self.runner.hidden)):
            sites = outputs[self._sites_from :]
            if not found:
                found.extend(SiteStatistics.empty(x.shape[-1]) for x in sites)
            shape = self.runner.batches[place].shape
            for statistics, x in zip(found, sites, strict=True):
                if moments_only:
                    statistics.add_products(x, self.runner.threads)
                    continue
                # An input that some tokens do not reach counts as one row.
                statistics.add(x.reshape(*shape, -1) if x.size == np.prod(shape) * x.shape[-1] else x)
            if advance and not self.section.last:
                self.runner.hidden[place][:] = outputs[0].reshape(self.runner.hidden[place].shape)
        return found

    def advance(self, weights: Weights) -> None:
        """Push the hidden states through the section with these weights."""
        self.push(weights, self.runner.hidden)

    def push(self, weights: Weights, hidden: Sequence[NDArray[np.float32]]) -> None:
        """Push other hidden states, of the first batches, through the section; each is replaced by what comes out."""
        for x, outputs in zip(hidden, self.outputs(weights, hidden), strict=True):
            # Some blocks (opt's) hand on [rows times length, channels].
            x[:] = outputs[0].reshape(x.shape)

    def pushed(self, weights: Weights, hidden: Sequence[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
        """As `push`, into new arrays."""
        return [self.runner.keep(outputs[0].reshape(x.shape)) for x, outputs in zip(hidden, self.outputs(weights, hidden), strict=True)]

    def outputs(self, weights: Weights, hidden: Sequence[NDArray[np.float32]]) -> Iterator[list[NDArray[np.float32]]]:
        """For each of the first batches, whose hidden states these are, what the section gives; good until the next is asked for."""
        # The last section may end with the inputs of its layers, not with their products.
        given = {name: w for name, w in oriented(self.section.layers, weights).items() if name in self._inputs}
        for batch, x in zip(self.runner.batches, hidden, strict=False):
            ambient = self.runner.ambient((batch.shape[0], batch.shape[1]))
            feed: dict[str, Any] = {name: ambient[name] for name in self.section.ambient}
            x = np.ascontiguousarray(x)
            feed[HIDDEN] = x.reshape(-1, x.shape[-1]) if self._flat else x
            self._request.infer({**feed, **given}, share_inputs=True)
            yield [self._request.get_output_tensor(i).data for i in range(len(self.section.model.outputs))]


def first_weights(
    graph: ModelGraph, sections: Sections, used: NDArray[np.int64], read: Callable[[Layer], NDArray[np.float32]]
) -> dict[str, NDArray[np.float32]]:
    """For `Runner.start`: of the embedding only the rows of tokens that occur."""
    found = {}
    for layer in sections.parts[0].layers:
        if layer is sections.embedding:
            found[layer.name] = np.concatenate([np.asarray(graph.rows(layer, i, i + 1), np.float32) for i in used.tolist()])
        else:
            found[layer.name] = read(layer)
    return found


def _batches(rows: Sequence[NDArray[np.int64]], tokens: int) -> Iterator[NDArray[np.int64]]:
    """Rows of equal length together, [rows, length], longest first; no row is padded.

    In an order of their own: sums over tokens, whose last bits decide ties, then do not depend on the order in which rows are given.
    """
    for length, same in groupby(sorted(rows, key=lambda row: (-len(row), row.tobytes())), key=len):
        step = max(1, tokens // length)
        while batch := list(islice(same, step)):
            yield np.stack(batch)


def oriented(layers: Sequence[Layer], weights: Weights) -> dict[str, NDArray[np.float32]]:
    """Weights by the names of a section's inputs, as its graph holds them."""
    return {WEIGHT + x.name: np.ascontiguousarray(weights[x.name].swapaxes(-1, -2)) if x.transposed else weights[x.name] for x in layers}


def _model_input(port: Any, shape: tuple[int, int], ids: NDArray[np.int64] | None) -> NDArray[Any]:
    """A value for an input of the whole model, for a batch of this shape without padding."""
    name, (rows, length) = port.get_any_name(), shape
    kind = port.get_element_type().to_dtype() if port.get_element_type() != ov.Type.bf16 else np.dtype(np.uint16)
    if name == "input_ids":
        return np.zeros(shape, kind) if ids is None else ids.astype(kind)
    if name == "attention_mask":
        return np.ones(shape, kind)
    if name == "position_ids":
        leading = [d.get_length() for d in list(port.get_partial_shape())[:-2]]
        return np.broadcast_to(np.arange(length, dtype=kind), (*leading, rows, length)).copy()
    if name == "beam_idx":
        return np.arange(rows, dtype=kind)
    if name == "token_type_ids":
        return np.zeros(shape, kind)
    fixed = [d.get_length() if d.is_static else None for d in port.get_partial_shape()]
    # Hidden states and placeholders, of which the shape alone counts; the table of an embedding needs one row.
    dynamic = iter((rows, length) if name == HIDDEN else (1,) * len(fixed))
    return np.zeros([next(dynamic) if d is None else d for d in fixed], kind)
