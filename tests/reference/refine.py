"""Scale refit and coordinate descent with everything computed anew at each step, in float64."""

from __future__ import annotations

import numpy as np

from llmcomp import formats
from tests.reference.gptq import damped
from tests.reference.nearest import nearest, stored_scale


def refine(
    fmt: formats.Format,
    w: np.ndarray,
    back: np.ndarray,
    h: np.ndarray,
    size: int,
    scale: np.ndarray,
    zero_point: np.ndarray | None,
    damping: float,
    sweeps: int,
) -> np.ndarray:
    """Rounded weights [rows, in] from `back`, which scales [rows, groups] and zero points belong to."""
    h, w, back, scale = damped(h, damping), np.float64(w), np.float64(back), np.float64(scale)
    for _ in range(sweeps):
        for g in range(w.shape[1] // size):
            part = slice(g * size, (g + 1) * size)
            zero = 0.0 if zero_point is None else np.float64(zero_point[:, g])
            if fmt.scale_type is None:
                q = back[:, part] / scale[:, g, None]
                best = stored_scale(
                    scale[:, g] + (q * ((w - back) @ h[:, part])).sum(1) / np.maximum((q @ h[part, part] * q).sum(1), 1e-30)
                )
                tried = back.copy()
                tried[:, part] = q * best[:, None]
                falls = cost(w, tried, h) < cost(w, back, h)
                scale[:, g] = np.where(falls, best, scale[:, g])
                back = np.where(falls[:, None], tried, back)
            for j in range(part.start, part.stop):
                back[:, j] = nearest(fmt, back[:, j] + (w - back) @ h[:, j] / h[j, j], scale[:, g], zero)
    return back


def cost(w: np.ndarray, back: np.ndarray, h: np.ndarray) -> np.ndarray:
    return np.einsum("ri,ij,rj->r", w - back, h, w - back)
