"""Second-order rounding: each column's rounding error is made up for by the columns after it.

Minimizes tr(D H D^T), D = W - W^, the mean squared error of the layer's output for inputs of second moments H. Source: Frantar et al. 2023
(GPTQ) in the form of LDLQ (Chee et al. 2023, QuIP): with H = R diag(d) R^T, R unit upper triangular, the loss is the sum over columns i of
d_i |t_i - q_i|^2, t_i = w_i + sum over j < i of D_j R_ji, so that t_i is what column i is best rounded from.

Arrays are kept with columns first, [in, rows]: a column is then one contiguous vector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.algorithms.hessian import BLOCK, DAMPING, Factor, Order, factorize, losses, undamped
from llmcomp.formats import NUMPY, Format, grouped_shape
from llmcomp.formats.array import storable

STEP = 16
"""Columns that an error is fed into one by one before a matrix product takes over."""

Grid = Mapping[str, Any]
"""Scale [and zero point]."""


@dataclass(frozen=True)
class Rounded:
    """A weight's codes and what they are worth."""

    codes: NDArray[Any]
    """[rows, groups, size], one code per item."""
    scale: NDArray[np.float32]
    """[rows, groups, 1], as it is stored."""
    zero_point: NDArray[np.float32] | None
    """Like the scale."""
    loss: NDArray[np.float32]
    """[rows]: tr(D H D^T) of each row, without damping."""
    before: NDArray[np.float32]
    """[rows]: that of plain rounding with the scales given, or of the codes given."""
    damping: float | None
    """None: H could not be factorized even with the strongest damping, so the codes are those given or of plain rounding."""


def gptq(
    fmt: Format,
    w: NDArray[Any],
    hessian: NDArray[Any] | Factor,
    group_size: int,
    scale: NDArray[np.float32],
    zero_point: NDArray[Any] | None = None,
    *,
    damping: float = DAMPING,
    order: Order = "activation",
    block: int = BLOCK,
) -> Rounded:
    """Codes of w [rows, in] for H [in, in], or for its factor, which says the order itself and serves all layers that share the input.

    `scale` [rows, groups, 1], as it will be stored, and `zero_point`; with `order="group"` they are one candidate beside those of the
    format. A row keeps plain rounding with the scales given unless its loss falls, with and without damping.

    Raises:
        GroupSizeError: the group size does not divide the rows.
    """
    rows = len(w)
    size = grouped_shape(w.shape, group_size)[-1]
    factor = hessian if isinstance(hessian, Factor) else factorize(hessian, size, order, damping)
    given = {"scale": _columns(scale, rows)} | ({} if zero_point is None else {"zero_point": _columns(zero_point, rows)})
    visited = np.arange(w.shape[1]) if factor is None else factor.order
    group_of = visited // size
    wide = np.ascontiguousarray(w.T, np.float32)[visited]
    each = {name: values[group_of] for name, values in given.items()}
    plain = fmt.encode(NUMPY, wide, **each)
    plain_delta = wide - fmt.decode(NUMPY, plain, **each)
    codes = NUMPY.codes(plain, fmt.code_type)
    if factor is None:
        assert not isinstance(hessian, Factor)
        moment = np.asarray(hessian, np.float32)
        loss = np.einsum("ir,ir->r", moment @ plain_delta, plain_delta)
        return Rounded(_stored(codes, visited, size), *_ranges(given), loss, loss, None)
    damped_before, before = losses(factor, plain_delta)
    found, delta, chosen, damped = _round(fmt, wide, factor, group_of, given, size if factor.by_group else block)
    loss = undamped(factor.extra, delta, damped)
    better = (loss < before) & (damped <= damped_before)
    codes = np.where(better, found, codes)
    kept = {name: np.where(better, chosen[name], values) for name, values in given.items()}
    return Rounded(_stored(codes, visited, size), *_ranges(kept), np.where(better, loss, before), before, factor.damping)


def best_of(first: Rounded, second: Rounded) -> Rounded:
    """Row by row the one of less loss; of equal ones the first."""
    better = second.loss < first.loss

    def pick(a: Any, b: Any) -> Any:
        return np.where(better.reshape(-1, *(1,) * (a.ndim - 1)), b, a)

    zero_point = None if first.zero_point is None else pick(first.zero_point, second.zero_point)
    codes, scale, loss = (pick(getattr(first, n), getattr(second, n)) for n in ("codes", "scale", "loss"))
    return Rounded(codes, scale, zero_point, loss, first.before, first.damping)


def _round(
    fmt: Format, wide: NDArray[np.float32], factor: Factor, group_of: NDArray[np.intp], given: Grid, block: int
) -> tuple[NDArray[Any], NDArray[np.float32], dict[str, NDArray[np.float32]], NDArray[np.float32]]:
    """Codes [in, rows], errors [in, rows], grids [groups, rows] and damped loss [rows]. If by group, `block` is the group's size."""
    width, rows = wide.shape
    codes = np.empty(wide.shape, NUMPY.codes(np.zeros(1, np.float32), fmt.code_type).dtype)
    delta = np.empty_like(wide)
    chosen = {name: np.array(values) for name, values in given.items()}
    total = np.zeros(rows, np.float32)
    for start in range(0, width, block):
        part = slice(start, min(start + block, width))
        unit, pivots, w = factor.unit[part, part], factor.pivots[part], wide[part]
        target = w + factor.unit[:start, part].T @ delta[:start]
        if not factor.by_group:
            grids = [{name: values[g] for name, values in given.items()} for g in group_of[part]]
            codes[part], delta[part] = _feed(fmt, w, target, unit, grids)
            total += pivots @ np.square(target)
            continue
        g = group_of[start]
        tried = _tried(fmt, target, pivots, {name: values[g] for name, values in given.items()})
        targets = np.repeat(target[:, None], len(tried["scale"]), axis=1)
        found, errors = _feed(fmt, w, targets, unit, [tried] * len(w))
        loss = np.tensordot(pivots, np.square(targets), 1)
        best = loss.argmin(axis=0)[None]
        codes[part] = np.take_along_axis(found, best[None], axis=1)[:, 0]
        delta[part] = np.take_along_axis(errors, best[None], axis=1)[:, 0]
        total += np.take_along_axis(loss, best, axis=0)[0]
        for name, values in tried.items():
            chosen[name][g] = np.take_along_axis(values, best, axis=0)[0]
    return codes, delta, chosen, total


def _feed(
    fmt: Format, w: NDArray[np.float32], target: NDArray[np.float32], unit: NDArray[np.float32], grids: Sequence[Grid]
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Codes and errors, both like `target`, of the columns w [m, rows].

    `target` [m, rows] or [m, candidates, rows] has the errors of all columns before these in it already; it becomes t - q.
    """
    codes = np.empty(target.shape, NUMPY.codes(np.zeros(1, np.float32), fmt.code_type).dtype)
    delta = np.empty_like(target)
    for start in range(0, len(w), STEP):
        stop = min(start + STEP, len(w))
        if start:
            fed = unit[:start, start:stop].T @ delta[:start].reshape(start, -1)
            target[start:stop] += fed.reshape(target[start:stop].shape)
        for i in range(start, stop):
            t = target[i]
            codes[i] = code = fmt.encode(NUMPY, t, **grids[i])
            q = fmt.decode(NUMPY, code, **grids[i])
            np.subtract(w[i], q, out=delta[i])
            np.subtract(t, q, out=t)
            if i + 1 < stop:
                target[i + 1 : stop] += np.multiply.outer(unit[i, i + 1 : stop], delta[i])
    return codes, delta


def _tried(fmt: Format, target: NDArray[np.float32], pivots: NDArray[np.float32], given: Grid) -> dict[str, NDArray[np.float32]]:
    """[candidates, rows]: the grids given and the format's own for the columns as earlier errors have moved them."""
    found: list[Grid] = [given, *fmt.candidates(NUMPY, np.ascontiguousarray(target.T), pivots[None])]
    tried = {name: np.stack([grid[name].reshape(-1) for grid in found]).astype(np.float32, copy=False) for name in given}
    return tried if fmt.scale_type else {**tried, "scale": storable(NUMPY, tried["scale"])}


def _columns(ranges: NDArray[Any], rows: int) -> NDArray[np.float32]:
    """[rows, groups, 1] as [groups, rows]."""
    return np.ascontiguousarray(ranges.reshape(rows, -1).T, np.float32)


def _ranges(grid: Grid) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    """Scale and zero point [groups, rows] as [rows, groups, 1]."""
    scale, zero_point = (None if a is None else np.ascontiguousarray(a.T)[..., None] for a in (grid["scale"], grid.get("zero_point")))
    assert scale is not None
    return scale, zero_point


def _stored(codes: NDArray[Any], visited: NDArray[np.intp], size: int) -> NDArray[Any]:
    """Codes [in, rows] in visiting order as [rows, groups, size]."""
    whole = np.empty_like(codes)
    whole[visited] = codes
    return np.ascontiguousarray(whole.T).reshape(codes.shape[1], -1, size)
