"""What a site saw: sums over tokens, which merge, whatever the lengths of the rows they came in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass
class SiteStatistics:
    """Of the inputs x [tokens, channels] of the layers that share a site. Every token counts once."""

    tokens: int
    total: NDArray[np.float64]
    """[channels]: sum of x."""
    total_abs: NDArray[np.float64]
    """[channels]: sum of |x|."""
    max_abs: NDArray[np.float32]
    """[channels]."""
    products: NDArray[np.float32]
    """[channels, channels]: sum of x xᵀ."""

    @classmethod
    def empty(cls, channels: int) -> SiteStatistics:
        return cls(0, np.zeros(channels), np.zeros(channels), np.zeros(channels, np.float32), np.zeros((channels, channels), np.float32))

    def add(self, x: NDArray[np.float32]) -> None:
        """Count x [..., channels]."""
        x = x.reshape(-1, x.shape[-1])
        self.tokens += len(x)
        self.total += x.sum(0, dtype=np.float64)
        magnitude = np.abs(x)
        self.total_abs += magnitude.sum(0, dtype=np.float64)
        np.maximum(self.max_abs, magnitude.max(0, initial=0), out=self.max_abs)
        self.products += x.T @ x

    def merge(self, other: SiteStatistics) -> None:
        self.tokens += other.tokens
        self.total += other.total
        self.total_abs += other.total_abs
        np.maximum(self.max_abs, other.max_abs, out=self.max_abs)
        self.products += other.products

    @property
    def second_moment(self) -> NDArray[np.float32]:
        """H [channels, channels]: mean of x xᵀ."""
        return self.products / np.float32(max(self.tokens, 1))
