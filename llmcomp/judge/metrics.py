"""The arithmetic: log-probabilities, windows, per-token divergence. Arrays in, arrays out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROWS = 32


@dataclass(frozen=True)
class Window:
    """Tokens [start, stop) are shown; those from position `first` of the window on are new."""

    start: int
    stop: int
    first: int

    @property
    def scored(self) -> slice:
        """Positions whose token is scored. The very first token of a window has no context and never is."""
        return slice(max(self.first, 1), self.stop - self.start)


def windows(tokens: int, length: int, stride: int, limit: int | None = None) -> Iterator[Window]:
    """Whole windows of `length` tokens, each `stride` after the last; with a stride below the length only new tokens are scored."""
    for i, start in enumerate(range(0, tokens - length + 1, stride)):
        if limit is not None and i >= limit:
            return
        yield Window(start, start + length, 0 if i == 0 else length - stride)


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float32]:
    """Natural log-probabilities [tokens, vocabulary] in f32."""
    out = np.array(logits, np.float32)
    for z in _blocks(out):
        z -= z.max(-1, keepdims=True)
        z -= np.log(np.exp(z).sum(-1, keepdims=True))
    return out


def token_nll(logp: NDArray[np.float32], ids: NDArray[np.int64], window: Window) -> NDArray[np.float32]:
    """Negative log-likelihood in nats of each scored token of a window; logp [length, vocabulary], ids [length]."""
    scored = window.scored
    positions = np.arange(scored.start, scored.stop)
    return -logp[positions - 1, ids[positions]]


def token_kl(reference: NDArray[np.float32], logp: NDArray[np.float32]) -> NDArray[np.float32]:
    """KL(reference || candidate) in nats at each position, both log-probabilities [tokens, vocabulary]."""
    return np.concatenate([(np.exp(p) * (p - q)).sum(-1) for p, q in zip(_blocks(reference), _blocks(logp), strict=True)])


def mean_over_windows(values: list[NDArray[np.float32]]) -> tuple[float, float | None]:
    """Mean over all values, and its standard error over windows, which may differ in length (the ratio estimator); None with a single one."""
    sizes = np.array([len(v) for v in values], np.float64)
    sums = np.array([v.sum(dtype=np.float64) for v in values])
    mean = sums.sum() / sizes.sum()
    n = len(values)
    if n < 2:
        return float(mean), None
    residual = sums - mean * sizes
    return float(mean), float(np.sqrt(n / (n - 1) * (residual**2).sum()) / sizes.sum())


def paired_difference(values: Sequence[float], others: Sequence[float]) -> tuple[float, float | None]:
    """Mean of values - others, window by window, and its standard error; None with a single window."""
    difference = np.asarray(values, np.float64) - np.asarray(others, np.float64)
    n = len(difference)
    return float(difference.mean()), float(difference.std(ddof=1) / np.sqrt(n)) if n > 1 else None


def _blocks(array: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
    """Views of a few rows, so that what is computed between them stays small."""
    for start in range(0, len(array), ROWS):
        yield array[start : start + ROWS]
