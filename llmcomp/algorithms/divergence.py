"""KL(p || q) of next-token distributions whose logits come a part of the vocabulary at a time, so that they never lie in memory whole.

With z the logits of p and y those of q, KL = E_p[z - y] - log sum e^z + log sum e^y; the sums are kept relative to the largest logit so far.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass
class LogSum:
    """log sum e^z of each of n tokens."""

    tokens: int
    peak: NDArray[np.float64] = field(init=False)
    total: NDArray[np.float64] = field(init=False)
    """[n]: sum of e^(z - peak)."""

    def __post_init__(self) -> None:
        self.peak, self.total = np.full(self.tokens, -np.inf), np.zeros(self.tokens)

    def add(self, z: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        """Count logits z [n, part]; returns e^(z - peak) and what earlier such terms are to be multiplied by, [n]."""
        peak = np.maximum(self.peak, z.max(-1))
        terms, factor = np.exp(z - peak[:, None].astype(np.float32)), np.exp(self.peak - peak)
        # In f32 the peak is exact: it is a logit.
        self.total = self.total * factor + terms.sum(-1, dtype=np.float64)
        self.peak = peak
        return terms, factor

    @property
    def value(self) -> NDArray[np.float64]:
        return self.peak + np.log(self.total)


@dataclass
class Divergence:
    """KL(p || q) of each of n tokens, p's LogSum being kept beside it for several q."""

    tokens: int
    q: LogSum = field(init=False)
    cross: NDArray[np.float64] = field(init=False)
    """[n]: sum of e^(z - peak of p) (z - y)."""

    def __post_init__(self) -> None:
        self.q, self.cross = LogSum(self.tokens), np.zeros(self.tokens)

    def add(self, p: tuple[NDArray[np.float32], NDArray[np.float64]], z: NDArray[np.float32], y: NDArray[np.float32]) -> None:
        """Count logits z of p and y of q, [n, part]; `p` is what p's LogSum made of z."""
        terms, factor = p
        self.cross = self.cross * factor + np.einsum("nv,nv->n", terms, z - y)
        self.q.add(y)

    def nats(self, p: LogSum) -> NDArray[np.float64]:
        """[n]: KL of each token, never negative, as rounding may make it."""
        return np.maximum(self.cross / p.total - p.value + self.q.value, 0)
