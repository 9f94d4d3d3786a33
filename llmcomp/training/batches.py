"""Which rows a step takes: a function of the seed and the step alone, so that a resumed run needs no history."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from llmcomp.errors import OptionError


@dataclass(frozen=True)
class Shares:
    """How the rows of a step are shared out."""

    rows: int
    """There are."""
    processes: int
    each: int
    """Rows of a step in each process."""
    accumulated: int
    """Microbatches of a step in each process."""

    @property
    def step_rows(self) -> int:
        return self.each * self.processes


def share_out(rows: int, processes: int, batch_rows: int, microbatch_rows: int) -> Shares:
    """
    Raises:
        OptionError: fewer rows than processes.
    """
    each = min(batch_rows, rows // processes)
    if not each:
        raise OptionError(f"{rows} training rows", f"there are {processes} processes", "Give at least one row for each process")
    return Shares(rows, processes, each, -(-each // microbatch_rows))


class MicroBatches:
    """Row numbers of the microbatches from step `start` on, without end: of each step those of all processes, which accelerate deals out in turn.

    The order is that of permutations of all rows, one after the other, so that in each epoch every row comes once.
    """

    def __init__(self, shares: Shares, seed: int, start: int) -> None:
        self.shares, self.seed, self.start = shares, seed, start

    def rows_of(self, step: int) -> list[int]:
        """Of all processes."""
        rows, size = self.shares.rows, self.shares.step_rows
        return [int(_order(self.seed, at // rows, rows)[at % rows]) for at in range(step * size, (step + 1) * size)]

    def __iter__(self) -> Iterator[list[int]]:
        step, shares = self.start, self.shares
        while True:
            picked = self.rows_of(step)
            # Process p has every processes-th row: one process with the batch of several sees the same rows in a step.
            parts = [np.array_split(picked[p :: shares.processes], shares.accumulated) for p in range(shares.processes)]
            for i in range(shares.accumulated):
                for part in parts:
                    yield part[i].tolist()
            step += 1


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, rows: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(rows)


def as_it_is(batch: list[torch.Tensor]) -> list[torch.Tensor]:
    """Batches come whole."""
    return batch
