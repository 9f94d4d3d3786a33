"""One layer under one scheme: which algorithms run, in which order, and which result is kept.

comes in: a weight with its factors in it, the second moments of its inputs, a Scheme
goes out: a CompressedWeight that loses no more than plain rounding, and what was tried
may import: algorithms, formats, kernels, planning
read first: solve
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp import formats, kernels, planning
from llmcomp.algorithms.awq import quadratic_loss
from llmcomp.algorithms.gptq import Rounded, best_of, gptq
from llmcomp.algorithms.hessian import Factor, Order, factorize
from llmcomp.algorithms.refine import refine
from llmcomp.algorithms.search import quick_estimation, scale_estimation, search
from llmcomp.formats import CompressedWeight
from llmcomp.kernels import Given
from llmcomp.planning import Scheme

RULES: dict[str, Any] = {planning.SEARCH: search, planning.SCALE_ESTIMATION: scale_estimation}
POWER_ROWS = 128
"""Rows by which a layer's power is told."""
TINY = 1e-30
"""In place of a power of zero, where errors are put in relation to it."""
ORDERS: tuple[Order, ...] = ("activation", "group")
"""Arms of second-order rounding. Beside scales by `scale_estimation`, which weigh inputs already, the second gains nothing."""


class Moments:
    """H of a site, and its factors for second-order rounding, made once for all layers that share it."""

    def __init__(self, hessian: NDArray[np.float32]) -> None:
        self.hessian = hessian
        self._factors: dict[tuple[int, Order], Factor | None] = {}

    @cached_property
    def diagonal(self) -> NDArray[np.float32]:
        return np.ascontiguousarray(np.diagonal(self.hessian))

    def factor(self, size: int, order: Order) -> Factor | None:
        """None if no damping makes H positive definite."""
        key = (size if order == "group" else 0, order)
        if key not in self._factors:
            self._factors[key] = factorize(self.hessian, size, order)
        return self._factors[key]


def roundtrip(scheme: Scheme, w: NDArray[np.float32], h: NDArray[np.float32], quick: bool = False) -> NDArray[np.float32]:
    """What w [rows, in] is after rounding with the scheme's scales, or `quick` with nearly these; h [in] the second moment of each input."""
    fmt, rule = formats.get(scheme.format), RULES.get(scheme.rule, scheme.rule)
    if quick and not isinstance(rule, str):
        rule = quick_estimation
    return kernels.roundtrip_rows(fmt, w, scheme.group_size, rule, Given(importance=np.ascontiguousarray(h, np.float32)))


@dataclass(frozen=True)
class Solved:
    """What became of a layer."""

    weight: CompressedWeight
    """With f32 scales."""
    back: NDArray[np.float32]
    """[rows, in]: what it stands for as it will be stored."""
    told: dict[str, Any]
    """For the report: the loss of its outputs, and that of plain rounding, relative to their power (that by some of its rows)."""


def solve(scheme: Scheme, w: NDArray[np.float32], moments: Moments) -> Solved:
    """w [rows, in] compressed; plainly, if that loses less."""
    weight = _quantize(scheme, w, RULES.get(scheme.rule, scheme.rule), moments.diagonal)
    if scheme.rounding == "gptq":
        weight = _second_order(scheme, w, weight, moments)
    best_rule = formats.get(scheme.format).best_rule
    plain = _quantize(scheme, w, RULES.get(best_rule, best_rule), moments.diagonal)
    backs = [one.stored().dequantize() for one in (weight, plain)]
    loss, plain_loss = (float(quadratic_loss(back - w, moments.hessian).sum()) for back in backs)
    some = w[:: max(1, len(w) // POWER_ROWS)]
    power = max(float(quadratic_loss(some, moments.hessian).mean()) * len(w), TINY)
    keeps = loss <= plain_loss
    told = {"loss": min(loss, plain_loss) / power, "plain_loss": plain_loss / power, "kept": "calibrated" if keeps else "plain"}
    return Solved(weight, backs[0], told) if keeps else Solved(plain, backs[1], told)


def _second_order(scheme: Scheme, w: NDArray[np.float32], start: CompressedWeight, moments: Moments) -> CompressedWeight:
    """GPTQ and its refinement."""
    fmt, scale = start.format, start.scale.reshape(len(w), -1, 1)
    zero_point = None if start.zero_point is None else start.zero_point.reshape(scale.shape)
    size = formats.grouped_shape(w.shape, scheme.group_size)[-1]
    arms: list[Rounded] = []
    for order in ORDERS[: 1 if scheme.rule == planning.SCALE_ESTIMATION else 2]:
        factor = moments.factor(size, order)
        arms.append(gptq(fmt, w, moments.hessian if factor is None else factor, scheme.group_size, scale, zero_point))
    best = arms[0] if len(arms) == 1 else best_of(arms[0], arms[1])
    best = refine(fmt, w, moments.hessian, scheme.group_size, best.codes, best.scale, best.zero_point)
    shape = start.scale.shape
    zeros = None if best.zero_point is None else best.zero_point.reshape(shape).astype(np.uint8)
    return CompressedWeight(
        fmt, w.shape, scheme.group_size, best.codes.reshape(start.codes.shape), best.scale.reshape(shape), zeros, scheme.rule
    )


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
