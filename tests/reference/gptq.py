"""GPTQ as its paper has it (Frantar et al. 2023, algorithm 1), and LDLQ with scales chosen in the loop (QuIP, algorithm 3), in float64."""

from __future__ import annotations

import numpy as np

from llmcomp import formats
from llmcomp.formats import NUMPY
from tests.reference.nearest import nearest, stored_scale


def damped(h: np.ndarray, damping: float) -> np.ndarray:
    """H with the mean of the live second moments on the diagonal of dead inputs, plus damping times that mean."""
    h = np.array(h, np.float64)
    diagonal = np.diag(h).copy()
    mean = diagonal[diagonal > 0].mean() if (diagonal > 0).any() else 1.0
    diagonal[diagonal <= 0] = mean
    h[np.diag_indices(len(h))] = diagonal + damping * mean
    return h


def loss(w: np.ndarray, back: np.ndarray, h: np.ndarray) -> np.ndarray:
    """Of each row."""
    delta = np.float64(w) - np.float64(back)
    return np.einsum("ri,ij,rj->r", delta, np.float64(h), delta)


def by_activation(
    fmt: formats.Format, w: np.ndarray, h: np.ndarray, size: int, scale: np.ndarray, zero_point: np.ndarray | None, damping: float
) -> np.ndarray:
    """Rounded weights [rows, in] with scales [rows, groups]: columns by descending second moment, errors pushed on by the inverse's factor."""
    return in_order(fmt, w, damped(h, damping), np.argsort(-np.diag(h), kind="stable"), size, scale, zero_point)


def in_order(
    fmt: formats.Format, w: np.ndarray, h: np.ndarray, order: np.ndarray, size: int, scale: np.ndarray, zero_point: np.ndarray | None
) -> np.ndarray:
    """The same for columns in any order and an H that is damped already."""
    inverse = np.linalg.inv(h[np.ix_(order, order)])
    upper = np.linalg.cholesky(inverse).T
    left, back = np.float64(w)[:, order], np.empty(w.shape)
    for i, column in enumerate(order):
        g = column // size
        zero = 0.0 if zero_point is None else np.float64(zero_point[:, g])
        back[:, column] = nearest(fmt, left[:, i], np.float64(scale[:, g]), zero)
        left[:, i + 1 :] -= np.outer((left[:, i] - back[:, column]) / upper[i, i], upper[i, i + 1 :])
    return back


def by_group(
    fmt: formats.Format, w: np.ndarray, h: np.ndarray, size: int, scale: np.ndarray, zero_point: np.ndarray | None, damping: float
) -> np.ndarray:
    """Rounded weights [rows, in]: groups by descending sum of second moments, columns likewise within; each group of each row with every
    candidate grid for its moved weights, the one of least loss kept."""
    moments = np.diag(h).reshape(-1, size)
    groups = np.argsort(-moments.sum(axis=1), kind="stable")
    order = np.concatenate([g * size + np.argsort(-moments[g], kind="stable") for g in groups])
    lower = np.linalg.cholesky(damped(h, damping)[np.ix_(order, order)][::-1, ::-1])
    factor = lower[::-1, ::-1]
    pivots, unit = np.diag(factor) ** 2, factor / np.diag(factor)
    back = np.empty(w.shape)
    for row in range(len(w)):
        ordered, delta = np.float64(w[row, order]), np.zeros(w.shape[1])
        for k, g in enumerate(groups):
            part = slice(k * size, (k + 1) * size)
            moved = np.float32(ordered[part] + delta[: part.start] @ unit[: part.start, part])
            given = {"scale": scale[row, g]} | ({} if zero_point is None else {"zero_point": zero_point[row, g]})
            best = np.inf
            for grid in [given, *fmt.candidates(NUMPY, moved[None], np.float32(pivots[None, part]))]:
                s = np.float64(np.ravel(grid["scale"]))
                s = s if fmt.scale_type else stored_scale(s)
                zero = np.float64(np.ravel(grid.get("zero_point", 0.0)))
                tried, cost, q = delta.copy(), 0.0, np.empty(size)
                for i in range(part.start, part.stop):
                    t = ordered[i] + tried[:i] @ unit[:i, i]
                    q[i - part.start] = nearest(fmt, np.array([t]), s, zero)[0]
                    tried[i] = ordered[i] - q[i - part.start]
                    cost += pivots[i] * (t - q[i - part.start]) ** 2
                if cost < best:
                    best, kept, values = cost, tried, q
            delta[part] = kept[part]
            back[row, order[part]] = values
    return back
