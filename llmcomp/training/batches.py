"""Which rows a step takes: a function of the seed and the step alone, so that a resumed run needs no history."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmcomp.errors import OptionError
from llmcomp.training.teacher import TeacherCache


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

    def __iter__(self) -> Iterator[list[int]]:
        step, (shares, size) = self.start, (self.shares, self.shares.step_rows)
        epoch, order = -1, np.zeros(0, np.int64)
        while True:
            picked = []
            for at in range(step * size, (step + 1) * size):
                if at // shares.rows != epoch:
                    epoch = at // shares.rows
                    order = np.random.default_rng([self.seed, epoch]).permutation(shares.rows)
                picked.append(int(order[at % shares.rows]))
            # Process p has every processes-th row: one process with the batch of several sees the same rows in a step.
            parts = [np.array_split(picked[p :: shares.processes], shares.accumulated) for p in range(shares.processes)]
            for i in range(shares.accumulated):
                for part in parts:
                    yield part[i].tolist()
            step += 1


class Rows:
    """Token rows with what the teacher says of them; a torch data set whose items are whole batches."""

    def __init__(self, rows: NDArray[np.integer[Any]], cache: TeacherCache, first: int) -> None:
        """Row i is row first + i of the cache."""
        self.rows, self.cache, self.first = rows, cache, first

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        """Ids [rows, length], then the three arrays of `Targets`."""
        at = np.asarray(indices, np.int64)
        return [torch.from_numpy(self.rows[at].astype(np.int64)), *self.cache.targets(at + self.first)]


def as_it_is(batch: list[torch.Tensor]) -> list[torch.Tensor]:
    """Batches come whole."""
    return batch
