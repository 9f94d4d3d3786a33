"""Weights through the quantizer into the .bin: row tile by row tile, several tiles at once, each written where the layout says.

Memory is a few tiles per worker and the scales of the layers in flight, whatever the model's size.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED as FIRST
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from llmcomp import formats
from llmcomp.errors import NonFiniteWeightError, PrecisionError
from llmcomp.formats import Part, pack, unpack
from llmcomp.formats.array import EPS
from llmcomp.formats.packing import bits as packing_bits
from llmcomp.graph.factors import NO_FACTORS, Factors
from llmcomp.graph.layer import Layer
from llmcomp.graph.model import ModelGraph, flat_rows
from llmcomp.graph.stored import stored_order
from llmcomp.planning import Scheme, float_type, layer_parts, stored
from llmcomp.planning.scheme import SOURCE_TYPES
from llmcomp.writing.finite import NonFinite, non_finite_error
from llmcomp.writing.journal import Journal, checksum
from llmcomp.writing.layout import Layout, Slot, integer_bytes
from llmcomp.writing.sampling import PLAIN, plain_squares, sampled
from llmcomp.writing.stored import check_same, stored_constants, stored_tile

TILE_WEIGHTS = 1 << 21
"""Weights per tile. Smaller ones would stay in a core's own cache, but then the threads wait for each other's Python between them: measured on
two cores with 4 MB of L2 and a 1.24 B model, 2^18 takes 5.9 s, 2^19 4.7, 2^20 4.3, 2^21 3.6, 2^22 3.3."""
SPARE_WORKERS = 1
"""Threads beyond one for each core: while one waits for a page, a lock or the interpreter, they compute (measured: 10 % less time)."""
NO_TABLES: Mapping[str, str] = {}
NOTHING: Mapping[str, Mapping[str, Any]] = {}
ROW_STEP = 8
"""Tiles start at multiples of this many rows, so that a row's 4-bit codes and zero points start at a whole byte."""


class TileResult(Protocol):
    """What `kernels.quantize_rows` gives."""

    @property
    def codes(self) -> NDArray[np.uint8]: ...
    @property
    def scale(self) -> NDArray[np.float32]: ...
    @property
    def zero_point(self) -> NDArray[np.uint8] | None: ...
    @property
    def finite(self) -> bool: ...


Quantizer = Callable[[Layer, Scheme, NDArray[Any], int], TileResult]
"""(layer, scheme, its rows [R, in], number of the first row) -> packed codes, f32 scales, packed zero points."""


@dataclass
class Outcome:
    """What happened to one layer."""

    name: str
    format: str
    """The plan's, or a codebook that was fitted in its place."""
    scale_type: str
    """The type that its chain computes in."""
    error: float
    """Relative squared error ||W - W'||^2 / ||W||^2 on sampled rows; 0 for a layer that is kept."""
    seconds: float
    sums: list[int] = field(default_factory=list)
    """Checksum of each tile's codes and zero points (or kept bytes), in row order."""
    scale_sum: int = 0
    rows_per_tile: int = 0
    plain_error: float = 0.0
    """As `error`, of rounding the source's own weights to nearest under minmax scales: neither rule, nor folds, nor data had a say."""
    faded: int = 0
    """Groups that are not all zero and whose weights are below the least step of a scale, or nearly."""
    lost: float = 0.0
    """The part of `error` that such groups have; not of a layer that was compressed elsewhere."""


@dataclass
class _Pending:
    layer: Layer
    scheme: Scheme
    tiles: int
    rows_per_tile: int
    started: float
    collected: int = 0
    sums: dict[int, int] = field(default_factory=dict)
    scales: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    squares: float = 0.0
    squared_error: float = 0.0
    plain: NDArray[np.float64] = field(default_factory=lambda: np.zeros(2))
    """Squares of the error of plain rounding, and of the source's weights."""
    faded: int = 0
    faded_error: float = 0.0


def tile_rows(width: int) -> int:
    """Rows of a tile of `width` weights each."""
    return max(ROW_STEP, TILE_WEIGHTS // width // ROW_STEP * ROW_STEP)


def leading_bytes(part: Part, row: int, rows: int) -> int:
    """Where row `row` of `rows` starts in a packed part; such a row starts at a whole byte."""
    return formats.packed_bytes((prod(part.shape) // rows * row,), part.element_type)


def stream(
    graph: ModelGraph,
    schemes: Mapping[str, Scheme],
    layout: Layout,
    path: Path,
    quantize: Quantizer,
    non_finite: NonFinite,
    journal: Journal,
    workers: int,
    factors: Factors = NO_FACTORS,
) -> tuple[dict[str, Outcome], dict[str, Slot]]:
    """Write a whole .bin; returns each layer's outcome and the places of the f32 scales in the tail.

    Raises:
        NonFiniteWeightError: a weight holds NaN or Inf.
    """
    with BinWriter(graph, schemes, layout, path, non_finite, journal, workers) as writer:
        writer.stream(graph.layers, quantize, factors)
        return writer.outcomes, writer.finish(factors)


def _cast(w: NDArray[Any], element_type: str, layer: Layer) -> NDArray[Any]:
    """Rows of a layer that stays float, in the type that is stored."""
    if element_type in ("bf16", SOURCE_TYPES[layer.dtype]):
        return w
    wide = np.asarray(w, np.float32)
    if element_type == "f32":
        return wide
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float16)
    if not np.isfinite(narrow).all():
        raise NonFiniteWeightError(layer.tensor, "a weight is too large for fp16", "Use --weight-format fp32, or a compressed format")
    return narrow


class BinWriter(AbstractContextManager["BinWriter"]):
    """The .bin while it is being written: layers by `stream` or `put`, in any order, then `finish`."""

    def __init__(
        self,
        graph: ModelGraph,
        schemes: Mapping[str, Scheme],
        layout: Layout,
        path: Path,
        non_finite: NonFinite,
        journal: Journal,
        workers: int,
        on_layer: Callable[[Layer, Outcome], None] = lambda *_: None,
        on_weights: Callable[[int], None] = lambda _: None,
        finished: Mapping[str, Mapping[str, Any]] = NOTHING,
    ) -> None:
        """`finished`: layer -> its journal record, of those that are in the file already."""
        self.graph, self.layout, self.path = graph, layout, path
        self.matrices = stored(graph.layers, schemes)
        self.schemes = {layer.name: scheme for layer, scheme in self.matrices}
        self.non_finite, self.journal, self.workers = non_finite, journal, workers
        self.on_layer, self.on_weights = on_layer, on_weights
        self.outcomes: dict[str, Outcome] = {}
        """Layer name -> what happened to it."""
        self._tail: dict[str, NDArray[np.float32]] = {}
        self._wide: dict[str, Slot] = {}
        self._local, self._files, self._lock = threading.local(), list[BinaryIO](), threading.Lock()
        for layer, scheme in self.matrices:
            if layer.name in finished:
                self._take_up(layer, scheme, finished[layer.name])
        with path.open("r+b" if finished else "wb") as file:
            file.truncate(layout.size)
            if hasattr(os, "posix_fallocate"):
                # A full disk shows now; and writing into blocks that are there already takes two thirds of the time.
                try:
                    os.posix_fallocate(file.fileno(), 0, max(layout.size, 1))
                except OSError as trouble:
                    if trouble.errno == errno.ENOSPC:
                        raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for file in self._files:
            file.close()

    def stream(
        self, layers: Iterable[Layer], quantize: Quantizer, factors: Factors = NO_FACTORS, tables: Mapping[str, str] = NO_TABLES
    ) -> None:
        """Read, fold, quantize and write these layers, several tiles at once. `tables`: layer name -> the codebook that was fitted to it.

        Raises:
            NonFiniteWeightError: a weight holds NaN or Inf.
            PrecisionError: a weight, times its factors, is beyond float32.
        """
        pending: set[Future[tuple[_Pending, int]]] = set()

        def collect(done: set[Future[tuple[_Pending, int]]]) -> None:
            for future in done:
                state, size = future.result()
                self.on_weights(size)
                state.collected += 1
                if state.collected == state.tiles:
                    self._finish_layer(state)

        with ThreadPoolExecutor(self.workers + SPARE_WORKERS, "llmcomp-stream") as pool:
            try:
                for state, tile in self._jobs(layers, tables):
                    # Read while the tiles before it are computed.
                    self.graph.prefetch(state.layer, *self._span(state, tile))
                    pending.add(pool.submit(self._work, state, tile, quantize, factors))
                    if len(pending) >= 2 * self.workers + SPARE_WORKERS:
                        done, pending = wait(pending, return_when=FIRST)
                        collect(done)
                done, pending = wait(pending)
                collect(done)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def check_finite(self, layer: Layer, w: NDArray[Any]) -> None:
        """Raises NonFiniteWeightError if these rows of a layer hold NaN or Inf."""
        if self.non_finite(w)[0]:
            raise non_finite_error(self.graph, layer, self.non_finite, tile_rows(layer.shape[-1]))

    def put(self, layer: Layer, weight: formats.CompressedWeight | NDArray[Any], error: float, seconds: float) -> None:
        """Write a layer that is compressed already, its scale in f32, or rows [R, in] of one that stays float. `error` as in Outcome.

        Raises:
            PrecisionError: its weights are beyond float32.
        """
        rows = tile_rows(layer.shape[-1])
        scheme = self.schemes[layer.name]
        if isinstance(weight, formats.CompressedWeight):
            scheme = replace(scheme, format=weight.format.name)
        state = _Pending(layer, scheme, -(-flat_rows(layer) // rows), rows, time.perf_counter() - seconds)
        for tile in range(state.tiles):
            start, stop = self._span(state, tile)
            if isinstance(weight, np.ndarray):
                state.sums[tile] = self._write_float(state, weight[start:stop], start)
                continue
            grouped = weight.codes.reshape(flat_rows(layer), -1)
            total = self._write_rows(layer, "codes", start, pack(grouped[start:stop], weight.format.code_type))
            if weight.zero_point is not None:
                zeros = weight.zero_point.reshape(len(grouped), -1)[start:stop].astype(np.uint8)
                total = self._write_rows(layer, "zero_point", start, pack(zeros, str(weight.format.zero_point_type)), total)
            state.sums[tile] = total
            state.scales[tile] = weight.scale[start:stop]
        state.squares, state.squared_error = 1.0, error
        # Adapters have no source.
        if isinstance(weight, formats.CompressedWeight) and layer.name in self.graph.sources:
            source = np.concatenate([self.graph.rows(layer, i, i + 1) for i in sampled(flat_rows(layer), 0, flat_rows(layer))])
            state.plain += plain_squares(weight.format, np.asarray(source, np.float32), scheme.group_size)
        self.on_weights(layer.size)
        self._finish_layer(state)

    def finish(self, factors: Factors) -> dict[str, Slot]:
        """Write what does not belong to a layer; returns the places of the scales of layers whose chain computes in f32.

        They are in the tail, but for those that are stored in a type of the format's own.
        """
        tail = {**self._wide, **_write_tail(self.path, self.matrices, self.layout, self._tail)}
        _write_constants(self.path, self.graph, self.layout, factors)
        return tail

    def _jobs(self, layers: Iterable[Layer], tables: Mapping[str, str]) -> Iterator[tuple[_Pending, int]]:
        for layer in layers:
            rows = tile_rows(layer.shape[-1])
            tiles = -(-flat_rows(layer) // rows)
            scheme = self.schemes[layer.name]
            scheme = replace(scheme, format=tables.get(layer.name, scheme.format))
            state = _Pending(layer, scheme, tiles, rows, time.perf_counter())
            for tile in range(tiles):
                yield state, tile

    def _span(self, state: _Pending, tile: int) -> tuple[int, int]:
        """Rows [start, stop) of a tile."""
        start = tile * state.rows_per_tile
        return start, min(start + state.rows_per_tile, flat_rows(state.layer))

    def _work(self, state: _Pending, tile: int, quantize: Quantizer, factors: Factors) -> tuple[_Pending, int]:
        layer, scheme = state.layer, state.scheme
        start, stop = self._span(state, tile)
        w = np.empty(0, np.float32) if scheme.is_stored else self.graph.rows(layer, start, stop)
        if scheme.is_float:
            self.check_finite(layer, w)
            if layer.name in factors:
                w = factors.apply(layer.name, np.asarray(w, np.float32), range(start, stop))
            total = self._write_float(state, w, start)
        else:
            rows_of: Callable[[list[int]], NDArray[Any]] = w.__getitem__
            if scheme.is_stored:
                result, rows_of = self._stored(state, start, stop)
            else:
                result = quantize(layer, scheme, w, start)
                if not result.finite:
                    self.check_finite(layer, w)
            total = self._write_rows(layer, "codes", start, result.codes)
            if result.zero_point is not None:
                total = self._write_rows(layer, "zero_point", start, result.zero_point, total)
            self._sample_error(state, start, stop, result, rows_of, factors)
            gone = 0
            if not scheme.is_stored and (np.abs(result.scale) <= EPS).any():
                wide = factors.apply(layer.name, np.asarray(w, np.float32), range(start, stop))
                gone = int(formats.faded(wide, result.scale, scheme.group_size).sum())
            with self._lock:
                state.scales[tile] = result.scale
                state.faded += gone
        with self._lock:
            state.sums[tile] = total
        return state, (stop - start) * layer.shape[-1]

    def _write_float(self, state: _Pending, w: NDArray[Any], start: int) -> int:
        narrow = np.ascontiguousarray(_cast(w, float_type(state.layer, state.scheme), state.layer))
        return self._write_rows(state.layer, "weight", start, narrow.view(np.uint8).reshape(-1))

    def _write_rows(self, layer: Layer, part: str, row: int, data: NDArray[np.uint8], before: int = 0) -> int:
        slot = self.layout.slots[layer.name, part]
        offset = leading_bytes(slot.part, row, flat_rows(layer))
        self._write(slot.offset + offset, data)
        return checksum(data, before)

    def _write(self, offset: int, data: NDArray[Any] | bytes) -> None:
        file = getattr(self._local, "file", None)
        if file is None:
            # One handle per worker: seek and write stay together without a lock, on every platform.
            file = self._local.file = self.path.open("r+b", buffering=0)
            with self._lock:
                self._files.append(file)
        file.seek(offset)
        view = memoryview(data).cast("B")
        while len(view):
            view = view[file.write(view) :]

    def _stored(self, state: _Pending, start: int, stop: int) -> tuple[TileResult, Callable[[list[int]], NDArray[Any]]]:
        """Rows in the codes of the source, and what gives some of them decoded."""
        layer, graph = state.layer, self.graph
        result = stored_tile(graph, layer, state.scheme, start, stop)
        if not result.finite:
            self.check_finite(layer, graph.rows(layer, start, stop))
        order = stored_order(graph, layer) if state.scheme.sorted else slice(None)
        return result, lambda picked: np.concatenate([graph.rows(layer, start + row, start + row + 1)[:, order] for row in picked])

    def _sample_error(
        self,
        state: _Pending,
        start: int,
        stop: int,
        result: TileResult,
        rows_of: Callable[[list[int]], NDArray[Any]],
        factors: Factors,
    ) -> None:
        """`rows_of` gives rows of the tile by their numbers in it."""
        layer, scheme = state.layer, state.scheme
        numbers = sampled(flat_rows(layer), start, stop)
        if not numbers:
            return
        picked = [number - start for number in numbers]
        fmt, source = formats.get(scheme.format), np.asarray(rows_of(picked), np.float32)
        rows = factors.apply(layer.name, source, numbers)
        back = _decoded_rows(fmt, scheme.group_size, (stop - start, layer.shape[-1]), result, picked, scheme)
        errors, gone = np.square(rows - back, dtype=np.float64), formats.faded(rows, result.scale[picked], scheme.group_size)
        found = float(errors.sum()), float(np.square(rows, dtype=np.float64).sum())
        is_plain = scheme.is_stored or (scheme.rule == PLAIN and layer.name not in factors)
        plain = found if is_plain else plain_squares(fmt, source, scheme.group_size)
        with self._lock:
            state.squared_error += found[0]
            state.squares += found[1]
            state.plain += plain
            state.faded_error += float(errors.reshape(*gone.shape, -1)[gone].sum())

    def _finish_layer(self, state: _Pending) -> None:
        """Store the scales of a layer whose tiles are all written: f16 in place, f32 for the tail. Then it is on record."""
        layer = state.layer
        scale_type: Literal["f16", "f32"] = "f16"
        scale_sum = 0
        if state.scales:
            fmt = formats.get(state.scheme.format)
            scale = np.concatenate([state.scales[t] for t in range(state.tiles)])
            _check_range(layer, fmt, scale)
            rule = state.scheme.rule
            if state.scheme.is_stored:
                scale_type, stored = state.scheme.scale_type, stored_constants(self.graph, layer, state.scheme, scale)
            else:
                loaded = fmt.load_scale(fmt.store_scale(scale, "f32", rule))
                # NVFP4's scales are relative to the largest of the weight: groups far below that have none.
                state.faded += int(((loaded == 0) & (np.abs(scale) > EPS)).sum())
                scale_type = formats.scale_type_needed(loaded, top=fmt.top)
                stored = fmt.store_scale(scale, scale_type, rule)
            stored = {**stored, **fmt.fixed()}
            for part in layer_parts(layer, replace(state.scheme, scale_type=scale_type)):
                if part.name not in stored:
                    continue
                data = pack(np.asarray(stored[part.name]), part.element_type)
                scale_sum = checksum(data, scale_sum)
                slot = self.layout.slots[layer.name, part.name]
                if part == slot.part:
                    self._write(slot.offset, data)
                    if part.name == "scale" and scale_type == "f32":
                        self._wide[layer.name] = slot
                else:
                    self._tail[layer.name] = scale
        error, lost = (x / state.squares if state.squares else 0.0 for x in (state.squared_error, state.faded_error))
        plain = float(state.plain[0] / state.plain[1]) if state.plain[1] else 0.0
        check_same(layer, state.scheme, error)
        seconds = time.perf_counter() - state.started
        sums = [state.sums[t] for t in range(state.tiles)]
        self.outcomes[layer.name] = Outcome(
            layer.name, state.scheme.format, scale_type, error, seconds, sums, scale_sum, state.rows_per_tile, plain, state.faded, lost
        )
        outcome = self.outcomes[layer.name]
        told = {"format": outcome.format, "scale_type": scale_type, "error": error, "plain_error": plain, "seconds": seconds}
        told |= {"tail": layer.name in self._tail, **({"faded": state.faded} if state.faded else {})}
        self.journal.add({"layer": layer.name, "rows": state.rows_per_tile, "sums": sums, "scale_sum": scale_sum, **told})
        self.on_layer(layer, outcome)

    def _take_up(self, layer: Layer, scheme: Scheme, record: Mapping[str, Any]) -> None:
        """Count a layer that an earlier run has written."""
        self.outcomes[layer.name] = Outcome(
            layer.name,
            record["format"],
            record["scale_type"],
            record["error"],
            record["seconds"],
            record["sums"],
            record["scale_sum"],
            record["rows"],
            record["plain_error"],
            record.get("faded", 0),
        )
        slot = self.layout.slots.get((layer.name, "scale"))
        if record["scale_type"] == "f32" and slot is not None:
            self._wide[layer.name] = slot
        self.on_weights(layer.size)


def _check_range(layer: Layer, fmt: formats.Format, scale: NDArray[np.float32]) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        beyond = int((~np.isfinite(np.abs(scale) * np.float32(fmt.top))).sum())
    if beyond:
        raise PrecisionError(
            layer.name,
            f"{beyond} of {scale.size} groups are so large that {fmt.name} would leave float32 (the largest number is 3.4e38)",
            f"Use --override '{layer.name}=keep'",
        )


def _write_tail(
    path: Path, matrices: Iterable[tuple[Layer, Scheme]], layout: Layout, scales: Mapping[str, NDArray[np.float32]]
) -> dict[str, Slot]:
    tail: dict[str, Slot] = {}
    position = layout.size
    with path.open("r+b") as file:
        for layer, _ in matrices:
            if layer.name in scales:
                part = Part("scale", "f32", layout.slots[layer.name, "scale"].part.shape)
                tail[layer.name] = Slot(part, position)
                file.seek(position)
                file.write(scales[layer.name].tobytes())
                position += -(-part.nbytes // 64) * 64
    return tail


def _decoded_rows(
    fmt: formats.Format, group_size: int, shape: tuple[int, ...], result: TileResult, picked: list[int], scheme: Scheme
) -> NDArray[np.float32]:
    """Some rows of a tile, from its packed codes back to weights."""
    width = shape[1]

    def rows_of(data: NDArray[np.uint8], element_type: str, size: int) -> NDArray[Any]:
        if size * packing_bits(element_type) % 8 or (element_type == "u3" and size % 8):
            return unpack(data, element_type, (shape[0], size))[picked]
        return unpack(np.ascontiguousarray(data.reshape(shape[0], -1)[picked]).reshape(-1), element_type, (len(picked), size))

    grouped = formats.grouped_shape((len(picked), width), group_size)
    per_group = (*grouped[:-1], 1)
    zero_point = None
    if result.zero_point is not None:
        zero_point = rows_of(result.zero_point, str(fmt.zero_point_type), width // grouped[-1]).reshape(per_group)
    codes = rows_of(result.codes, fmt.code_type, width).reshape(grouped)
    if scheme.is_stored:
        # Its scales are those that are written, whatever they are stored in.
        values = fmt.decode(formats.NUMPY, formats.NUMPY.numbers(codes, fmt.code_type), result.scale[picked], zero_point)
        return np.asarray(values, np.float32).reshape(len(picked), width)
    weight = formats.CompressedWeight(fmt, (len(picked), width), group_size, codes, result.scale[picked], zero_point, scheme.rule)
    return weight.stored().dequantize()


def _write_constants(path: Path, graph: ModelGraph, layout: Layout, factors: Factors) -> None:
    with path.open("r+b") as file:
        for number, (offset, _) in layout.constants.items():
            file.seek(offset)
            changed = factors.constants.get(number)
            file.write(graph.constant_bytes(number) if changed is None else changed.astype("<f4").tobytes())
        for number, (offset, _) in layout.inserted.items():
            file.seek(offset)
            file.write(factors.inserted[number].astype("<f4").tobytes())
        for values, offset in layout.integers.items():
            file.seek(offset)
            file.write(integer_bytes(values))
