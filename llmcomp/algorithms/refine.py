"""Codes and scales that are already good made better: scales by least squares, codes one column after another, both under the full H.

What is minimized is the damped loss of `gptq`, tr(D (H + diag(extra)) D^T). With G = (H + diag(extra)) D^T, group k's scale of least loss
is off by (q_k . G_k) / (q_k^T H_kk q_k), q the levels, and column j alone is best rounded from w^_j + G_j / H_jj (Gauss-Seidel; the form of
OPTQ's successors, e.g. Behdin et al. 2023, QuantEase, lemma 1). Every step lowers the loss or leaves it.

G is computed anew for each block of columns at its turn, over all inputs: a product for a few columns is kept in a core's cache, while keeping up
G of all columns takes as many operations, those of its first value on top, and memory's time. The sums of H in front of and behind a block also give
the loss before a sweep and after it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.algorithms.columns import RoundColumns, round_columns, runs
from llmcomp.algorithms.gptq import UNSEEN, Rounded
from llmcomp.algorithms.hessian import BLOCK, DAMPING, padding
from llmcomp.formats import NUMPY, Format, grouped_shape
from llmcomp.formats.array import storable
from llmcomp.formats.format import TINY

SWEEPS = 2

Losses = tuple[NDArray[np.float32], NDArray[np.float32]]
"""(damped, not damped) [rows]."""


@UNSEEN
def refine(
    fmt: Format,
    w: NDArray[Any],
    hessian: NDArray[Any],
    group_size: int,
    codes: NDArray[Any],
    scale: NDArray[np.float32],
    zero_point: NDArray[Any] | None = None,
    *,
    damping: float = DAMPING,
    sweeps: int = SWEEPS,
    rounder: RoundColumns = round_columns,
) -> Rounded:
    """Refit and re-round w [rows, in], of which `codes` [rows, groups, size], `scale` and `zero_point` [rows, groups, 1] are given.

    Formats that store scales in a type of their own keep theirs. A row keeps what it had unless its loss falls, with and without damping.

    Raises:
        GroupSizeError: the group size does not divide the rows.
    """
    rows = len(w)
    size = grouped_shape(w.shape, group_size)[-1]
    extra = padding(hessian, damping).astype(np.float32)
    moment = np.asarray(hessian, np.float32)
    work = _Work(fmt, moment, extra, np.ascontiguousarray(w.T, np.float32), size, codes, scale, zero_point, rounder)
    block = max(size, BLOCK // size * size)
    found = [work.sweep(block) for _ in range(sweeps)]
    (damped_before, before), (damped, loss) = found[0][0], found[-1][1]
    better = (damped < damped_before) & (loss <= before)
    new_codes = np.ascontiguousarray(work.codes.T).reshape(rows, -1, size)
    new_scale = np.ascontiguousarray(work.scale.T)[..., None]
    old = np.asarray(codes).reshape(new_codes.shape)
    return Rounded(
        np.where(better[:, None, None], new_codes, old),
        np.where(better[:, None, None], new_scale, scale.reshape(new_scale.shape)),
        None if zero_point is None else np.asarray(zero_point, np.float32).reshape(new_scale.shape),
        np.where(better, loss, before),
        before,
        damping,
    )


class _Work:
    """The state of one weight, columns first. `delta` is D, `slope` is G. `moment` is H, which is not copied: at thousands of channels that counts."""

    def __init__(
        self,
        fmt: Format,
        moment: NDArray[np.float32],
        extra: NDArray[np.float32],
        w: NDArray[np.float32],
        size: int,
        codes: NDArray[Any],
        scale: NDArray[np.float32],
        zero_point: NDArray[Any] | None,
        rounder: RoundColumns,
    ) -> None:
        width, rows = w.shape
        self.fmt, self.moment, self.extra, self.w, self.size, self.rounder = fmt, moment, extra[:, None], w, size, rounder
        self.codes = np.array(np.asarray(codes).reshape(rows, width).T, order="C")
        self.scale = np.array(scale.reshape(rows, -1).T, np.float32, order="C")
        self.zero_point = None if zero_point is None else np.array(np.asarray(zero_point).reshape(rows, -1).T, np.float32, order="C")
        self.inverse = (1 / (np.diagonal(moment) + extra)).astype(np.float32)
        self.back = np.empty_like(w)
        for group in range(width // size):
            part = self.columns(group)
            self.back[part] = self.decoded(self.codes[part], group)
        self.delta = w - self.back

    def columns(self, group: int) -> slice:
        return slice(group * self.size, (group + 1) * self.size)

    def grid(self, group: int) -> dict[str, Any]:
        grid = {"scale": self.scale[group]}
        return grid if self.zero_point is None else {**grid, "zero_point": self.zero_point[group]}

    def decoded(self, codes: NDArray[Any], group: int, **other: Any) -> Any:
        return self.fmt.decode(NUMPY, NUMPY.numbers(codes, self.fmt.code_type), **{**self.grid(group), **other})

    def sweep(self, block: int) -> tuple[Losses, Losses]:
        """Visit all columns, `block` of them at a time; returns the losses before and after."""
        width, rows = self.w.shape
        found = np.zeros((2, 2, rows), np.float32)
        for start in range(0, width, block):
            found += self.visit(start, min(start + block, width))
        np.maximum(found, np.float32(0), out=found)
        return (found[0, 0], found[0, 1]), (found[1, 0], found[1, 1])

    def visit(self, start: int, stop: int) -> NDArray[np.float32]:
        """Scale and codes of the groups in columns [start, stop); returns their part in the losses [before or after, damped or not, rows].

        Products with the columns behind them, which are as they were, belong to the losses before; those with the ones in front to those after.
        """
        here = slice(start, stop)
        moment, extra, before = self.moment[here], self.extra[here], self.delta[here].copy()
        front, behind = moment[:, :start] @ self.delta[:start], moment[:, stop:] @ self.delta[stop:]
        own = moment[:, here] @ before
        slopes = front + behind + own + extra * before
        moved = np.empty_like(before)
        for group in range(start // self.size, stop // self.size):
            part = self.columns(group)
            done = part.start - start
            slope = slopes[done : done + self.size] - moment[:done, part].T @ moved[:done]
            old = self.back[part].copy()
            if self.fmt.scale_type is None:
                self.refit(group, slope)
            self.round(group, slope)
            moved[done : done + self.size] = self.back[part] - old
        after = np.subtract(self.w[here], self.back[here], out=self.delta[here])
        sums = ((before, own + 2 * behind), (after, moment[:, here] @ after + 2 * front))
        plain = [np.einsum("ir,ir->r", delta, seen) for delta, seen in sums]
        return np.stack([np.stack([loss + extra[:, 0] @ np.square(delta), loss]) for (delta, _), loss in zip(sums, plain, strict=True)])

    def refit(self, group: int, slope: NDArray[np.float32]) -> None:
        """The group's scale of least loss, as it is stored; `slope` [size, rows] is kept up."""
        part, scale = self.columns(group), self.scale[group]
        own = self.moment[part, part].copy()
        own[np.diag_indices(self.size)] += self.extra[part, 0]
        levels = self.decoded(self.codes[part], group, scale=np.float32(1))
        curve = np.einsum("ir,ir->r", levels, own @ levels)
        pull = np.einsum("ir,ir->r", levels, slope)
        some = curve > TINY
        wanted = storable(NUMPY, scale + np.where(some, pull / np.where(some, curve, 1), 0).astype(np.float32))
        step = wanted - scale
        # A grid of scale 0 would lose the group's codes, and rounding may have moved the scale past the gain.
        falls = some & (wanted != 0) & (2 * step * pull > step * step * curve)
        self.scale[group] = np.where(falls, wanted, scale)
        back = self.decoded(self.codes[part], group)
        slope -= own @ (back - self.back[part])
        self.back[part] = back

    def round(self, group: int, slope: NDArray[np.float32]) -> None:
        """The group's columns, one after another, each from where it alone would best be; `slope` [size, rows] is that in front of them."""
        first, grid = group * self.size, self.grid(group)
        moved = np.empty_like(slope)
        for part in runs(self.size):
            here = slice(first + part.start, first + part.stop)
            now = slope[part]
            if part.start:
                now = now - self.moment[first : here.start, here].T @ moved[: part.start]
            grids = {name: np.broadcast_to(values, now.shape) for name, values in grid.items()}
            codes, moved[part], _ = self.rounder(self.fmt, self.back[here], now, self.inverse[here], self.moment[here, here], grids)
            self.codes[here] = codes
            self.back[here] = self.decoded(codes, group)
