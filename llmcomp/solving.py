"""One layer under one scheme: which algorithms run, in which order, and which result is kept.

comes in: a weight with its factors in it, the second moments of its inputs, a Scheme
goes out: a CompressedWeight that loses no more than plain rounding, and what was tried
may import: algorithms, formats, kernels, planning, threads
read first: solve
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp import formats, kernels, planning
from llmcomp.algorithms.awq import quadratic_loss
from llmcomp.algorithms.cholesky import Each, in_turn
from llmcomp.algorithms.columns import RoundColumns, round_columns
from llmcomp.algorithms.gptq import Rounded, gptq, gptq_errors
from llmcomp.algorithms.hessian import Factor, Order, factorize
from llmcomp.algorithms.refine import refine
from llmcomp.algorithms.search import quick_estimation, scale_estimation, search
from llmcomp.formats import CompressedWeight, Format
from llmcomp.kernels import Given
from llmcomp.planning import Scheme
from llmcomp.threads import Threads

RULES: dict[str, Any] = {planning.SEARCH: search, planning.SCALE_ESTIMATION: scale_estimation}
POWER_ROWS = 128
"""Rows by which a layer's power is told."""
LOSS_ROWS = 512
"""Rows whose losses are told together: differences of whole weights would take as much memory as these."""
PIECE_ROWS, PIECE_WEIGHTS = 768, 1 << 21
"""Rows that go through all algorithms together, as many as a core's own cache has room for in a run of columns; weights, for memory."""
LEAST_WEIGHTS = 1 << 18
"""Weights that make it worth while to occupy another thread."""
ARM_ROWS = 128
"""Rows whose loss decides between the arms of second-order rounding."""
NUMPY_BELOW = 1 << 16
"""Weights below which columns are rounded before a compiled kernel for it is ready."""
TINY = 1e-300
"""In place of a power of zero, where errors are put in relation to it: both are f64, and powers of the least weights far below f32's."""


class Moments:
    """H of a site, and its factors for second-order rounding, made once for all layers that share it."""

    def __init__(self, hessian: NDArray[np.float32]) -> None:
        self.hessian = hessian
        self._factors: dict[tuple[int, Order], Factor | None] = {}

    @cached_property
    def diagonal(self) -> NDArray[np.float32]:
        return np.ascontiguousarray(np.diagonal(self.hessian))

    def factor(self, size: int, order: Order, each: Each = in_turn) -> Factor | None:
        """None if no damping makes H positive definite. `each`: how it is made, as for `factorize`."""
        key = (size if order == "group" else 0, order)
        if key not in self._factors:
            self._factors[key] = factorize(self.hessian, size, order, each=each)
        return self._factors[key]


def roundtrip(scheme: Scheme, w: NDArray[np.float32], h: NDArray[np.float32], quick: bool = False) -> NDArray[np.float32]:
    """What w [rows, in] is after rounding to nearest with the scheme's scales, or `quick` with nearly these; h [in] the second moment of each
    input."""
    fmt, rule = formats.get(scheme.format), _rule(scheme)
    if quick and not isinstance(rule, str):
        rule = quick_estimation
    return kernels.roundtrip_rows(fmt, w, scheme.group_size, rule, Given(importance=np.ascontiguousarray(h, np.float32)))


def errors(
    scheme: Scheme, moments: Moments, w: NDArray[np.float32], ts: Sequence[NDArray[np.float32]], quick: bool = False
) -> list[NDArray[np.float32]]:
    """For each t [in]: what w [rows, in] changes by if w t goes through `roundtrip`, for inputs of `moments` over t."""
    return [roundtrip(scheme, w * t, moments.diagonal / (t * t), quick) / t - w for t in ts]


def second_order_errors(
    scheme: Scheme, moments: Moments, factor: Factor, w: NDArray[np.float32], ts: Sequence[NDArray[np.float32]]
) -> list[NDArray[np.float32]]:
    """As `errors`, by second-order rounding; `factor` is that of the moments."""
    fmt, grids = formats.get(scheme.format), []
    for t in ts:
        start = _quantize(scheme, w * t, _rule(scheme), moments.diagonal / (t * t))
        grids.append((t, *_grid(start)))
    return gptq_errors(fmt, w, factor, grids, rounder=_rounder(fmt, w.size * len(ts)))


@dataclass(frozen=True)
class Solved:
    """What became of a layer."""

    weight: CompressedWeight
    """With f32 scales."""
    back: NDArray[np.float32]
    """[rows, in]: what it stands for as it will be stored."""
    told: dict[str, Any]
    """For the report: the loss of its outputs, and that of plain rounding, relative to their power (that by some of its rows)."""


def solve(asked: Sequence[tuple[Scheme, NDArray[np.float32], NDArray[np.float32]]], moments: Moments, threads: Threads) -> list[Solved]:
    """Weights that read the same inputs, compressed; plainly those that lose less then.

    Each with its scheme: the weight itself [rows, in], which plain rounding rounds, and what it is to come near to, itself as a rule.
    """
    found: list[list[tuple[CompressedWeight, CompressedWeight]]] = [[] for _ in asked]
    width = len(moments.hessian)
    weights, targets = [w for _, w, _ in asked], [target for *_, target in asked]
    for scheme in dict.fromkeys(scheme for scheme, *_ in asked):
        pieces = list(_pieces({i: len(w) for i, (own, w, _) in enumerate(asked) if own == scheme}, width, threads.count))

        def joined(piece: list[tuple[int, slice]], of: Sequence[NDArray[np.float32]] = targets) -> NDArray[np.float32]:
            return np.concatenate([of[i][rows] for i, rows in piece])

        order: Order | None = None
        if scheme.rounding == "gptq":
            whole = [(i, slice(0, len(w))) for i, (own, w, _) in enumerate(asked) if own == scheme]
            step = max(1, sum(rows.stop for _, rows in whole) // ARM_ROWS)
            order = _order(scheme, joined([(i, slice(0, rows.stop, step)) for i, rows in whole]), moments, threads)

        def compressed(
            piece: list[tuple[int, slice]], scheme: Scheme = scheme, order: Order | None = order
        ) -> tuple[CompressedWeight, CompressedWeight]:
            return _compressed(scheme, joined(piece, weights), joined(piece), moments, order)

        for piece, pair in zip(pieces, threads.map(compressed, pieces), strict=True):
            start = 0
            for i, rows in piece:
                stop = start + rows.stop - rows.start
                found[i].append((_rows(pair[0], start, stop), _rows(pair[1], start, stop)))
                start = stop
    return [_better(target, pairs, moments, threads) for (*_, target), pairs in zip(asked, found, strict=True)]


def _pieces(rows: Mapping[int, int], width: int, threads: int) -> Iterator[list[tuple[int, slice]]]:
    """Rows of several weights, by their numbers, in pieces of nearly equal size: many together spare Python's time, too many cost memory."""
    total = sum(rows.values())
    count = max(-(-total // min(PIECE_ROWS, max(1, PIECE_WEIGHTS // width))), min(threads, total * width // LEAST_WEIGHTS))
    step = -(-total // count)
    piece, left = [], step
    for i, own in rows.items():
        start = 0
        while start < own:
            stop = min(start + left, own)
            piece.append((i, slice(start, stop)))
            left -= stop - start
            start = stop
            if not left:
                yield piece
                piece, left = [], step
    if piece:
        yield piece


def _compressed(
    scheme: Scheme, w: NDArray[np.float32], target: NDArray[np.float32], moments: Moments, order: Order | None
) -> tuple[CompressedWeight, CompressedWeight]:
    """The target as asked, with second-order rounding in this order, and w plainly rounded."""
    weight = _quantize(scheme, target, _rule(scheme), moments.diagonal)
    plain = _quantize(scheme, w, formats.get(scheme.format).best_rule, moments.diagonal)
    if order is not None:
        weight = _weight(scheme, weight, _refined(scheme, target, moments, order, weight))
    return weight, plain


def _order(scheme: Scheme, w: NDArray[np.float32], moments: Moments, threads: Threads) -> Order:
    """The arm of second-order rounding that loses less on these rows."""
    # Scales that are refitted afterwards gain nothing from being chosen within groups: on calibration data outputs lose 4 % less, on other
    # text the model loses no less (evaluation/LOG.md). Factors are made here, each by all threads, before these ask for them.
    orders: tuple[Order, ...] = ("activation",) if formats.get(scheme.format).scale_type is None else ("activation", "group")
    for order in orders:
        moments.factor(formats.grouped_shape(w.shape, scheme.group_size)[-1], order, threads.map)
    if len(orders) == 1:
        return orders[0]
    start = _quantize(scheme, w, _rule(scheme), moments.diagonal)
    losses = threads.map(lambda order: float(_refined(scheme, w, moments, order, start).loss.sum()), orders)
    return orders[int(np.argmin(losses))]


def _refined(scheme: Scheme, w: NDArray[np.float32], moments: Moments, order: Order, start: CompressedWeight) -> Rounded:
    """Second-order rounding from the scales of `start`, made better."""
    rounder = _rounder(start.format, w.size)
    factor = moments.factor(formats.grouped_shape(w.shape, scheme.group_size)[-1], order)
    given = moments.hessian if factor is None else factor
    first = gptq(start.format, w, given, scheme.group_size, *_grid(start), rounder=rounder)
    return refine(start.format, w, moments.hessian, scheme.group_size, first.codes, first.scale, first.zero_point, rounder=rounder)


def _weight(scheme: Scheme, start: CompressedWeight, found: Rounded) -> CompressedWeight:
    """What was found, in the shapes of `start`."""
    shape = start.scale.shape
    zeros = None if found.zero_point is None else found.zero_point.reshape(shape).astype(np.uint8)
    codes, scale = found.codes.reshape(start.codes.shape), found.scale.reshape(shape)
    return CompressedWeight(start.format, start.shape, scheme.group_size, codes, scale, zeros, scheme.rule)


def _grid(weight: CompressedWeight) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    """Scale and zero point [rows, groups, 1]."""
    scale = weight.scale.reshape(weight.shape[0], -1, 1)
    return scale, None if weight.zero_point is None else weight.zero_point.reshape(scale.shape)


def _rounder(fmt: Format, weights: int) -> RoundColumns:
    return kernels.round_columns if kernels.has_columns(fmt) and weights >= NUMPY_BELOW else round_columns


def _rows(one: CompressedWeight, start: int, stop: int) -> CompressedWeight:
    zero_point = None if one.zero_point is None else one.zero_point[start:stop]
    return replace(one, shape=(stop - start, one.shape[1]), codes=one.codes[start:stop], scale=one.scale[start:stop], zero_point=zero_point)


def _better(
    w: NDArray[np.float32], pieces: Sequence[tuple[CompressedWeight, CompressedWeight]], moments: Moments, threads: Threads
) -> Solved:
    """Of a weight's pieces put together that of the two which loses less."""
    weight, plain = (_joined(kind, w.shape) for kind in zip(*pieces, strict=True))
    backs = [one.stored().dequantize() for one in (weight, plain)]
    parts = [(back, slice(start, start + LOSS_ROWS)) for back in backs for start in range(0, len(w), LOSS_ROWS)]
    losses = threads.map(lambda part: float(quadratic_loss(part[0][part[1]] - w[part[1]], moments.hessian).sum()), parts)
    loss, plain_loss = (sum(losses[i * len(losses) // 2 : (i + 1) * len(losses) // 2]) for i in range(2))
    some = w[:: max(1, len(w) // POWER_ROWS)]
    power = max(float(quadratic_loss(some, moments.hessian).mean()) * len(w), TINY)
    keeps = loss <= plain_loss
    told = {"loss": min(loss, plain_loss) / power, "plain_loss": plain_loss / power, "kept": "calibrated" if keeps else "plain"}
    return Solved(weight, backs[0], told) if keeps else Solved(plain, backs[1], told)


def _joined(pieces: Sequence[CompressedWeight], shape: tuple[int, ...]) -> CompressedWeight:
    if len(pieces) == 1:
        return pieces[0]
    zero_point = None if pieces[0].zero_point is None else np.concatenate([one.zero_point for one in pieces])
    codes, scale = np.concatenate([one.codes for one in pieces]), np.concatenate([one.scale for one in pieces])
    return replace(pieces[0], shape=shape, codes=codes, scale=scale, zero_point=zero_point)


def _rule(scheme: Scheme) -> Any:
    """A rule of the format by its name, or a function that finds scales."""
    return RULES.get(scheme.rule, scheme.rule)


def _quantize(scheme: Scheme, w: NDArray[np.float32], rule: Any, importance: NDArray[np.float32]) -> CompressedWeight:
    """Nearest codes under a rule's scales."""
    fmt = formats.get(scheme.format)
    tile = kernels.quantize_rows(fmt, w, scheme.group_size, rule, Given(importance=importance))
    grouped = formats.grouped_shape(w.shape, scheme.group_size)
    zero_point = None
    if tile.zero_point is not None:
        zero_point = formats.unpack(tile.zero_point, str(fmt.zero_point_type), (*grouped[:-1], 1))
    codes = formats.unpack(tile.codes, fmt.code_type, grouped)
    return CompressedWeight(
        fmt, w.shape, scheme.group_size, codes, tile.scale, zero_point, rule if isinstance(rule, str) else rule.__name__
    )
