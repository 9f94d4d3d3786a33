"""What a site saw: sums over tokens, which merge, whatever the lengths of the rows they came in."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from llmcomp.threads import Threads

ALONE = Threads(1)
PART = 256
"""Columns of second moments that are summed together."""


@dataclass
class Activity:
    """NNCF's scalars of a site: each row has one, of its own tokens, and all rows count alike."""

    rows: int = 0
    square: float = 0.0
    """Sum over rows of the mean of x^2."""
    mean_variance: float = 0.0
    """Sum over rows of the mean over channels of the variance over tokens."""
    max_variance: float = 0.0
    """The same with the largest over channels."""
    magnitude: float = 0.0
    """Sum over rows of the mean over channels of the largest |x| over tokens."""

    def add(self, x: NDArray[np.float32], mean: NDArray[np.float64], max_abs: NDArray[np.float32]) -> None:
        """Count x [rows, tokens, channels], of which mean and max_abs over tokens [rows, channels] are given."""
        spread = x - mean[:, None].astype(np.float32)
        variance = np.einsum("rtc,rtc->rc", spread, spread).astype(np.float64) / x.shape[1]
        self.rows += len(x)
        self.square += float((variance + np.square(mean)).mean(-1).sum())
        self.mean_variance += float(variance.mean(-1).sum())
        self.max_variance += float(variance.max(-1).sum())
        self.magnitude += float(max_abs.mean(-1, dtype=np.float64).sum())

    def merge(self, other: Activity) -> None:
        self.rows += other.rows
        self.square += other.square
        self.mean_variance += other.mean_variance
        self.max_variance += other.max_variance
        self.magnitude += other.magnitude

    def means(self) -> dict[str, float]:
        """mean_square, mean_variance, max_variance and magnitude, averaged over rows."""
        sums = {"mean_square": self.square, "mean_variance": self.mean_variance, "max_variance": self.max_variance}
        return {name: value / max(self.rows, 1) for name, value in {**sums, "magnitude": self.magnitude}.items()}


@dataclass
class SiteStatistics:
    """Of the inputs x [tokens, channels] of the layers that share a site. Every token counts once, but for `activity`."""

    tokens: int
    total: NDArray[np.float64]
    """[channels]: sum of x."""
    total_abs: NDArray[np.float64]
    """[channels]: sum of |x|."""
    max_abs: NDArray[np.float32]
    """[channels]."""
    products: NDArray[np.float32]
    """[channels, channels]: sum of x xᵀ, of which only the upper triangle counts."""
    activity: Activity

    @classmethod
    def empty(cls, channels: int) -> SiteStatistics:
        zeros = np.zeros((channels, channels), np.float32)
        return cls(0, np.zeros(channels), np.zeros(channels), np.zeros(channels, np.float32), zeros, Activity())

    def add(self, x: NDArray[np.float32]) -> None:
        """Count x [..., tokens, channels]; leading axes are rows."""
        if not x.size:
            return
        x = x.reshape(-1, *x.shape[-2:])
        magnitude = np.abs(x)
        sums, max_abs = x.sum(1, dtype=np.float64), magnitude.max(1)
        self.activity.add(x, sums / x.shape[1], max_abs)
        self.total += sums.sum(0)
        np.maximum(self.max_abs, max_abs.max(0), out=self.max_abs)
        self.total_abs += magnitude.sum((0, 1), dtype=np.float64)
        self.add_products(x)

    def add_products(self, x: NDArray[np.float32], threads: Threads = ALONE) -> None:
        """Count x [..., channels] in tokens and second moments alone."""
        x = x.reshape(-1, x.shape[-1])
        self.tokens += len(x)

        def add(stop: int) -> None:
            start = max(0, stop - PART)
            with np.errstate(over="ignore", invalid="ignore"):  # Calibration refuses what is beyond f32 by the layer's name.
                self.products[:stop, start:stop] += x[:, :stop].T @ x[:, start:stop]

        # The upper triangle, in parts of columns, the longest first.
        threads.map(add, range(x.shape[-1], 0, -PART))

    def merge(self, other: SiteStatistics) -> None:
        self.tokens += other.tokens
        self.total += other.total
        self.total_abs += other.total_abs
        np.maximum(self.max_abs, other.max_abs, out=self.max_abs)
        self.products += other.products
        self.activity.merge(other.activity)

    @property
    def second_moment(self) -> NDArray[np.float32]:
        """H [channels, channels]: mean of x xᵀ."""
        return replace(self, products=self.products.copy()).take_second_moment()

    def take_second_moment(self) -> NDArray[np.float32]:
        """`second_moment` in the place of the products, which are gone."""
        self.products /= np.float32(max(self.tokens, 1))
        for stop in range(len(self.products), 0, -PART):
            part = slice(max(0, stop - PART), stop)
            self.products[part, : part.start] = self.products[: part.start, part].T
        return self.products


class CrossProducts:
    """Sum over tokens of a b^T."""

    def __init__(self, threads: Threads = ALONE) -> None:
        self.threads, self.tokens = threads, 0
        self._total: NDArray[np.float32] | None = None

    def add(self, a: NDArray[np.float32], b: NDArray[np.float32]) -> None:
        """Count a [tokens, m] and b [tokens, n]."""
        self.tokens += len(a)
        if self._total is None:
            self._total = np.zeros((a.shape[1], b.shape[1]), np.float32)
        total = self._total

        def add(start: int) -> None:
            total[start : start + PART] += a[:, start : start + PART].T @ b

        self.threads.map(add, range(0, a.shape[1], PART))

    def mean(self) -> NDArray[np.float32]:
        """[m, n]; takes the sum with it."""
        assert self._total is not None
        total, self._total = self._total, None
        total /= np.float32(max(self.tokens, 1))
        return total
