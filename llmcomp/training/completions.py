"""Prompts with completions as padded token rows, and the task's loss: the cross-entropy of the completion's tokens, and of no other.

Rows are filled up on the right, where a causal model looks from no token that counts: what the padding is changes nothing, and no mask of attention is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmcomp.training import logits
from llmcomp.training.divergence import Targets, summed_divergence

PAD = 0
"""A token that every model has."""


@dataclass(frozen=True, eq=False)
class Completions:
    """Rows [rows, length]."""

    ids: NDArray[np.int64]
    counted: NDArray[np.bool_]
    """Whether the token of the next place is one of the completion."""

    @classmethod
    def of(cls, rows: Sequence[tuple[NDArray[np.int64], int]], length: int) -> Completions:
        """Of (tokens of prompt and completion, where the completion begins), each cut off at `length`. The first token of a row has none before it that
        it could follow, so that it never counts."""
        ids, counted = np.full((len(rows), length), PAD, np.int64), np.zeros((len(rows), length), bool)
        for i, (row, begins) in enumerate(rows):
            stop = min(len(row), length)
            ids[i, :stop] = row[:stop]
            counted[i, max(begins - 1, 0) : stop - 1] = True
        return cls(ids, counted)


def summed_cross_entropy(student: Any, reading: logits.Reading, ids: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Sum in nats over the places of ids [rows, length] that count; logits are made of these places alone.

    It is the KL to a teacher that is certain of the next token: log 1 for it, and nothing for the others.
    """
    places = counted[:, :-1]
    hidden = logits.hidden_states(student, reading, ids)[:, :-1][places]
    weight, bias = logits.head_of(student, reading)
    following = ids[:, 1:][places][:, None]
    certain = torch.zeros(following.shape, device=ids.device)
    return summed_divergence(hidden, weight, bias, Targets(certain, following, torch.full_like(certain[:, 0], -torch.inf)), reading)
