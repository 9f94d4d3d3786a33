"""Second-order rounding: each column's rounding error is made up for by the columns after it.

Minimizes tr(D H D^T), D = W - W^, the mean squared error of the layer's output for inputs of second moments H. Source: Frantar et al. 2023
(GPTQ) in the form of LDLQ (Chee et al. 2023, QuIP): with H = R diag(d) R^T, R unit upper triangular, the loss is the sum over columns i of
d_i |t_i - q_i|^2, t_i = w_i + sum over j < i of D_j R_ji, so that t_i is what column i is best rounded from.

Arrays are kept with columns first, [in, rows]: a column is then one contiguous vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.algorithms.columns import Grid, RoundColumns, round_columns, runs
from llmcomp.algorithms.hessian import BLOCK, DAMPING, Factor, Order, factorize, losses, undamped
from llmcomp.formats import NUMPY, Format, grouped_shape
from llmcomp.formats.array import storable

UNSEEN = np.errstate(over="ignore", invalid="ignore")
"""A loss beyond f32 is Inf or NaN, which is not less than any: such rows keep what they had."""


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


@UNSEEN
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
    rounder: RoundColumns = round_columns,
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
    found, delta, chosen, damped = _round(fmt, wide, factor, group_of, given, size if factor.by_group else block, rounder)
    loss = undamped(factor.extra, delta, damped)
    better = (loss < before) & (damped <= damped_before)
    codes = np.where(better, found, codes)
    kept = {name: np.where(better, chosen[name], values) for name, values in given.items()}
    return Rounded(_stored(codes, visited, size), *_ranges(kept), np.where(better, loss, before), before, factor.damping)


@UNSEEN
def gptq_errors(
    fmt: Format,
    w: NDArray[np.float32],
    factor: Factor,
    grids: Sequence[tuple[NDArray[np.float32], NDArray[np.float32], NDArray[Any] | None]],
    *,
    rounder: RoundColumns = round_columns,
) -> list[NDArray[np.float32]]:
    """What w [rows, in] changes by where columns times t [in] are rounded, for inputs over t, with a scale and zero point [rows, groups, 1].

    `grids`: (t, scale, zero point), which are tried side by side: rounding w t to multiples of s is rounding w to those of s / t, and what
    columns make up for is the same in both, so that one factor in activation order serves all.
    """
    rows, width = w.shape
    group_of = factor.order // (width // grids[0][1].shape[1])
    wide = np.tile(np.ascontiguousarray(w.T, np.float32)[factor.order], len(grids))
    each = {"scale": np.concatenate([_columns(scale, rows)[group_of] / t[factor.order, None] for t, scale, _ in grids], axis=1)}
    zeros = [_columns(zero_point, rows)[group_of] for *_, zero_point in grids if zero_point is not None]
    if zeros:
        each["zero_point"] = np.concatenate(zeros, axis=1)
    moved = np.empty_like(wide)
    for start in range(0, width, BLOCK):
        part = slice(start, min(start + BLOCK, width))
        columns = factor.columns(start, part.stop)
        state = -(columns[:, :start] @ moved[:start])
        _, moved[part], _ = _feed(
            fmt, wide[part], state, columns[:, part].T, {name: values[part] for name, values in each.items()}, rounder
        )
    whole = np.empty_like(moved)
    whole[factor.order] = moved
    return [np.ascontiguousarray(whole[:, i * rows : (i + 1) * rows].T) for i in range(len(grids))]


def _round(
    fmt: Format,
    wide: NDArray[np.float32],
    factor: Factor,
    group_of: NDArray[np.intp],
    given: Grid,
    block: int,
    rounder: RoundColumns,
) -> tuple[NDArray[Any], NDArray[np.float32], dict[str, NDArray[np.float32]], NDArray[np.float32]]:
    """Codes [in, rows], errors [in, rows], grids [groups, rows] and damped loss [rows]. If by group, `block` is the group's size."""
    width, rows = wide.shape
    codes = np.empty(wide.shape, NUMPY.codes(np.zeros(1, np.float32), fmt.code_type).dtype)
    moved = np.empty_like(wide)
    chosen = {name: np.array(values) for name, values in given.items()}
    total = np.zeros(rows, np.float32)
    for start in range(0, width, block):
        part = slice(start, min(start + block, width))
        columns, pivots, w = factor.columns(start, part.stop), factor.pivots[part], wide[part]
        unit = columns[:, part].T
        # What columns before these leave to be made up for: t - w.
        state = -(columns[:, :start] @ moved[:start])
        if not factor.by_group:
            grid = {name: values[group_of[part]] for name, values in given.items()}
            codes[part], moved[part], left = _feed(fmt, w, state, unit, grid, rounder)
            total += pivots @ np.square(left)
            continue
        g = group_of[start]
        tried = _tried(fmt, w + state, pivots, {name: values[g] for name, values in given.items()})
        states = np.repeat(state[:, None], len(tried["scale"]), axis=1)
        found, moves, left = _feed(fmt, w, states, unit, tried, rounder)
        loss = np.tensordot(pivots, np.square(left), 1)
        best = loss.argmin(axis=0)[None]
        codes[part] = np.take_along_axis(found, best[None], axis=1)[:, 0]
        moved[part] = np.take_along_axis(moves, best[None], axis=1)[:, 0]
        total += np.take_along_axis(loss, best, axis=0)[0]
        for name, values in tried.items():
            chosen[name][g] = np.take_along_axis(values, best, axis=0)[0]
    return codes, np.negative(moved, out=moved), chosen, total


def _feed(
    fmt: Format,
    w: NDArray[np.float32],
    state: NDArray[np.float32],
    unit: NDArray[np.float32],
    grid: Grid,
    rounder: RoundColumns,
) -> tuple[NDArray[Any], NDArray[np.float32], NDArray[np.float32]]:
    """Codes, what columns moved by, q - w, and what of their targets is left, t - q, all like `state`, of the columns w [m, rows].

    `state` [m, rows] or [m, candidates, rows] is t - w by the columns before these.
    """
    codes = np.empty(state.shape, NUMPY.codes(np.zeros(1, np.float32), fmt.code_type).dtype)
    moved, left = np.empty_like(state), np.empty_like(state)
    own = state.ndim == w.ndim
    for part in runs(len(w)):
        now = state[part]
        if part.start:
            now = now - (unit[: part.start, part].T @ moved[: part.start].reshape(part.start, -1)).reshape(now.shape)
        grids = {name: values[part] for name, values in grid.items()} if own else grid
        gain = np.ones(len(now), np.float32)
        codes[part], moved[part], seen = rounder(fmt, w[part], now, gain, unit[part, part], grids)
        np.subtract(seen, moved[part], out=left[part])
    return codes, moved, left


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
