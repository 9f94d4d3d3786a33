"""How long a model's greedy answers stay those of the reference.

The figures are who-what-benchmark's "FDT" and "FDT norm" (`tools/who_what_benchmark/whowhatbench/whowhat_metrics.py` of openvino.genai; the
measure is from Deiseroth et al., "Divergent Token Metrics", arXiv:2311.01544): the mean number of tokens before the first one that
differs, and the same over the mean length of the reference's answers. Two details differ. The tokens are those that the models chose, where
who-what-benchmark tokenizes the answers' text again; and the token that ends an answer counts, so that stopping elsewhere is a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Agreement:
    first_divergent: float
    """FDT: tokens before the first that differs, mean over prompts; the length of the answer where none does."""
    first_divergent_share: float
    """FDT norm: the same over the mean length of the reference's answers; 1 if all are the same."""
    identical: int
    """Answers without any difference."""
    answers: int


def agreement(reference: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Agreement:
    """Token ids of the answers to each prompt; one prompt or more, and no empty answer of the reference."""
    common = [first_divergent(a, b) for a, b in zip(reference, answers, strict=True)]
    identical = sum(list(a) == list(b) for a, b in zip(reference, answers, strict=True))
    mean = float(np.mean(common))
    return Agreement(mean, mean / float(np.mean([len(a) for a in reference])), identical, len(common))


def first_divergent(a: Sequence[int], b: Sequence[int]) -> int:
    """Index of the first token that differs; the length of the shorter where none does."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
