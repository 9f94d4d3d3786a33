"""Sums over windows, and the scores that they give."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmcomp.judge.errors import JudgeError
from llmcomp.judge.metrics import Window, mean_over_windows, token_kl, token_nll

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Scores:
    """What one model got. KL and agreement are None for the reference and without one."""

    name: str
    perplexity: float
    """Per token; `inf` where it has no float."""
    word_perplexity: float | None
    """exp(nll / whitespace words that begin in a scored token); None if no word does."""
    kl: float | None
    """KL(reference || model), nats, mean over positions."""
    kl_standard_error: float | None
    """Over windows; None with a single one."""
    kl_percentiles: dict[str, float] | None
    """Median, 90th and 99th percentile over positions."""
    top1: float | None
    """How often both rate the same token highest."""
    bin_bytes: int | None
    windows: int
    window: int
    stride: int
    seconds: float
    """Spent in the model itself."""
    tokens: int
    """Scored ones."""
    window_kl: tuple[float, ...] = ()
    """Each window's mean, for comparisons in pairs."""
    perplexity_standard_error: float | None = None
    """Over windows, from the error of the mean loss; None with a single window or an infinite perplexity."""


class Tally:
    """One model's sums over windows."""

    def __init__(self, name: str, bin_bytes: int | None) -> None:
        self.name, self.bin_bytes, self.seconds = name, bin_bytes, 0.0
        self._words, self._agreed = 0.0, 0
        self._nll: list[NDArray[np.float32]] = []
        self._kl: list[NDArray[np.float32]] = []

    def add(self, logp: NDArray[np.float32], ids: NDArray[np.int64], words: NDArray[np.float64], window: Window) -> None:
        """Score a window: log-probabilities [length, vocabulary], ids and words [length]."""
        self._nll.append(token_nll(logp, ids, window))
        self._words += float(words[window.scored].sum())

    def compare(self, expected: NDArray[np.float32], logp: NDArray[np.float32], window: Window) -> None:
        """Hold a window against the reference's log-probabilities, at the positions of new tokens."""
        if expected.shape != logp.shape:
            raise JudgeError(
                f"{self.name}: the vocabularies differ: {expected.shape[-1]} in the reference, {logp.shape[-1]} in the model. "
                "Give the reference that it was made of."
            )
        p, q = expected[window.first :], logp[window.first :]
        self._kl.append(token_kl(p, q))
        self._agreed += int((p.argmax(-1) == q.argmax(-1)).sum())

    def scores(self, windows: int, window: int, stride: int) -> Scores:
        loss, loss_error = mean_over_windows(self._nll)
        tokens = sum(len(nll) for nll in self._nll)
        perplexity = _exp(loss)
        kl = error = percentiles = top1 = None
        if self._kl:
            kl, error = mean_over_windows(self._kl)
            every = np.concatenate(self._kl)
            percentiles = {str(p): float(np.percentile(every, p)) for p in PERCENTILES}
            top1 = self._agreed / len(every)
        return Scores(
            self.name,
            perplexity,
            _exp(loss * tokens / self._words) if self._words else None,
            kl,
            error,
            percentiles,
            top1,
            self.bin_bytes,
            windows,
            window,
            stride,
            self.seconds,
            tokens,
            tuple(float(k.mean(dtype=np.float64)) for k in self._kl),
            perplexity * loss_error if loss_error is not None and perplexity < math.inf else None,
        )


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf
