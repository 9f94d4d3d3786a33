"""Codes and scales that are already good made better: scales by least squares, codes one column after another, both under the full H.

What is minimized is the damped loss of `gptq`, tr(D (H + diag(extra)) D^T). With G = (H + diag(extra)) D^T, group k's scale of least loss
is off by (q_k . G_k) / (q_k^T H_kk q_k), q the levels, and column j alone is best rounded from w^_j + G_j / H_jj (Gauss-Seidel; the form of
OPTQ's successors, e.g. Behdin et al. 2023, QuantEase, lemma 1). Every step lowers the loss or leaves it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.algorithms.gptq import STEP, Rounded
from llmcomp.algorithms.hessian import BLOCK, DAMPING, padding, undamped
from llmcomp.formats import NUMPY, Format, grouped_shape
from llmcomp.formats.array import storable
from llmcomp.formats.format import TINY

SWEEPS = 2


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
) -> Rounded:
    """Refit and re-round w [rows, in], of which `codes` [rows, groups, size], `scale` and `zero_point` [rows, groups, 1] are given.

    Formats that store scales in a type of their own keep theirs. A row keeps what it had unless its loss falls, with and without damping.

    Raises:
        GroupSizeError: the group size does not divide the rows.
    """
    rows, width = w.shape
    size = grouped_shape(w.shape, group_size)[-1]
    extra = padding(hessian, damping).astype(np.float32)
    moment = np.array(hessian, np.float32)
    moment[np.diag_indices(width)] += extra
    work = _Work(fmt, moment, np.ascontiguousarray(w.T, np.float32), size, codes, scale, zero_point)
    damped_before = work.damped_loss()
    before = undamped(extra, work.delta(), damped_before)
    block = max(size, BLOCK // size * size)
    for _ in range(sweeps):
        for start in range(0, width, block):
            work.visit(start, min(start + block, width))
    damped = work.damped_loss()
    loss = undamped(extra, work.delta(), damped)
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
    """The state of one weight, columns first. `slope` is G."""

    def __init__(
        self,
        fmt: Format,
        moment: NDArray[np.float32],
        w: NDArray[np.float32],
        size: int,
        codes: NDArray[Any],
        scale: NDArray[np.float32],
        zero_point: NDArray[Any] | None,
    ) -> None:
        width, rows = w.shape
        self.fmt, self.moment, self.w, self.size = fmt, moment, w, size
        self.codes = np.array(np.asarray(codes).reshape(rows, width).T, order="C")
        self.scale = np.array(scale.reshape(rows, -1).T, np.float32, order="C")
        self.zero_point = None if zero_point is None else np.array(np.asarray(zero_point).reshape(rows, -1).T, np.float32, order="C")
        self.inverse = (1 / np.diagonal(moment)).astype(np.float32)
        self.back = np.empty_like(w)
        for group in range(width // size):
            part = self.columns(group)
            self.back[part] = self.decoded(self.codes[part], group)
        self.slope = moment @ self.delta()

    def columns(self, group: int) -> slice:
        return slice(group * self.size, (group + 1) * self.size)

    def grid(self, group: int) -> dict[str, Any]:
        grid = {"scale": self.scale[group]}
        return grid if self.zero_point is None else {**grid, "zero_point": self.zero_point[group]}

    def decoded(self, codes: NDArray[Any], group: int, **other: Any) -> Any:
        return self.fmt.decode(NUMPY, NUMPY.numbers(codes, self.fmt.code_type), **{**self.grid(group), **other})

    def delta(self) -> NDArray[np.float32]:
        return self.w - self.back

    def damped_loss(self) -> NDArray[np.float32]:
        return np.maximum(np.einsum("ir,ir->r", self.delta(), self.slope), np.float32(0))

    def visit(self, start: int, stop: int) -> None:
        """Scale and codes of the groups in columns [start, stop), then G everywhere."""
        moved = np.empty((stop - start, self.w.shape[1]), np.float32)
        for group in range(start // self.size, stop // self.size):
            part = self.columns(group)
            done = part.start - start
            slope = self.slope[part] - self.moment[part, start : part.start] @ moved[:done]
            old = self.back[part].copy()
            if self.fmt.scale_type is None:
                self.refit(group, slope)
            self.round(group, slope)
            moved[done : done + self.size] = self.back[part] - old
        self.slope -= self.moment[:, start:stop] @ moved

    def refit(self, group: int, slope: NDArray[np.float32]) -> None:
        """The group's scale of least loss, as it is stored; `slope` [size, rows] is kept up."""
        part, scale = self.columns(group), self.scale[group]
        own = self.moment[part, part]
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
        """The group's columns, one after another, each from where it alone would best be; `slope` [size, rows] is kept up."""
        first, grid = group * self.size, self.grid(group)
        moved = np.empty_like(slope)
        for start in range(0, self.size, STEP):
            stop = min(start + STEP, self.size)
            here = slope[start:stop]
            if start:
                here -= self.moment[first + start : first + stop, first : first + start] @ moved[:start]
            for i in range(start, stop):
                j = first + i
                code = self.fmt.encode(NUMPY, self.back[j] + slope[i] * self.inverse[j], **grid)
                back = self.fmt.decode(NUMPY, code, **grid)
                np.subtract(back, self.back[j], out=moved[i])
                self.codes[j] = code
                self.back[j] = back
                if i + 1 < stop:
                    slope[i + 1 : stop] -= np.multiply.outer(self.moment[j, j + 1 : first + stop], moved[i])
