"""How long a model takes for the first token of an answer and for each later one."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import numpy as np
from numpy.typing import NDArray

from llmcomp.judge.models import IRModel


@dataclass(frozen=True)
class Speed:
    """Milliseconds in the runtime, medians over the repeats. Tokenization is not in it."""

    first_token_ms: float
    """From the prompt to its last token's logits."""
    later_token_ms: float
    """From a token to the next one's logits, mean over an answer."""


def measure(folder: Path, prompt: NDArray[np.int64], tokens: int, repeats: int) -> Speed:
    """Greedy decoding of `tokens` tokens behind the prompt, `repeats` times and once before to warm up, with the runtime's defaults."""
    model = IRModel(folder, {})
    rounds = [_round(model, prompt, tokens) for _ in range(repeats + 1)][1:]
    return Speed(median(times[0] for times in rounds), median(mean(times[1:]) for times in rounds))


def _round(model: IRModel, prompt: NDArray[np.int64], tokens: int) -> list[float]:
    """Milliseconds to each token."""
    model.begin()
    shown, times = prompt, []
    for _ in range(tokens):
        started = time.perf_counter()
        logits = model.extend(shown)
        times.append(1e3 * (time.perf_counter() - started))
        shown = np.array([logits[-1].argmax()], np.int64)
    return times
