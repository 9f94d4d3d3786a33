"""What a student learns: the teacher's distribution of every token, or the completions of prompts. Each gives batches and their summed loss."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from llmcomp.errors import OptionError
from llmcomp.training import logits
from llmcomp.training.completions import Completions, summed_cross_entropy
from llmcomp.training.divergence import Targets, summed_divergence
from llmcomp.training.teacher import TeacherCache, digest

Batch = list[torch.Tensor]


class Rows(Protocol):
    """A torch data set whose items are whole batches."""

    counts: NDArray[np.int64]
    """[rows]: tokens of each whose loss is taken."""

    def __len__(self) -> int: ...

    def __getitems__(self, indices: list[int]) -> Batch:
        """What the loss of the objective takes."""
        ...


class Objective(Protocol):
    """One of the two."""

    measure: str
    """The loss, in the log: kl, cross_entropy."""
    rows: Rows
    held_out: Rows

    def check(self, student: Any) -> None:
        """
        Raises:
            LlmcompError: the student cannot learn this.
        """

    def identity(self) -> dict[str, Any]:
        """What a resumed run must have again."""
        ...

    def loss(self, student: Any, reading: logits.Reading, batch: Batch) -> torch.Tensor:
        """Summed over the tokens that count, in nats."""
        ...


class TeacherRows:
    """Token rows [rows, length] with what the teacher says of them."""

    def __init__(self, rows: NDArray[np.integer[Any]], cache: TeacherCache, first: int) -> None:
        """Row i is row first + i of the cache."""
        self.rows, self.cache, self.first = rows, cache, first
        self.counts = np.full(len(rows), rows.shape[1], np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: list[int]) -> Batch:
        """Ids [rows, length], then the three arrays of `Targets`."""
        at = np.asarray(indices, np.int64)
        return [torch.from_numpy(self.rows[at].astype(np.int64)), *self.cache.targets(at + self.first)]


class Distillation:
    """KL of the teacher's distribution to the student's, of every token; `cache` holds the answers to `rows`, then to `held_out`."""

    measure = "kl"

    def __init__(self, rows: NDArray[np.integer[Any]], held_out: NDArray[np.integer[Any]], cache: TeacherCache) -> None:
        """
        Raises:
            OptionError: no rows, of two lengths, or in both sets.
        """
        check_rows(rows, held_out)
        self.cache = cache
        self.rows, self.held_out = TeacherRows(rows, cache, 0), TeacherRows(held_out, cache, len(rows))

    def check(self, student: Any) -> None:
        columns = logits.vocabulary_of(student)
        if columns != self.cache.vocabulary:
            found = f"the student has {columns} tokens, the teacher {self.cache.vocabulary}"
            raise OptionError("the student", found, "Give both one vocabulary")
        self.cache.check(np.concatenate([self.rows.rows, self.held_out.rows]))

    def identity(self) -> dict[str, Any]:
        return {
            "rows": digest(self.rows.rows),
            "held_out_rows": digest(self.held_out.rows),
            "teacher": self.cache.description["identity"],
            "kept": self.cache.k,
        }

    def loss(self, student: Any, reading: logits.Reading, batch: Batch) -> torch.Tensor:
        ids, *told = batch
        hidden = logits.hidden_states(student, reading, ids).flatten(0, 1)
        weight, bias = logits.head_of(student, reading)
        return summed_divergence(hidden, weight, bias, Targets(*told), reading)


class CompletionRows:
    """Prompts with completions; a batch is as long as its longest row."""

    def __init__(self, rows: Completions) -> None:
        self.rows, self.counts = rows, rows.counted.sum(1).astype(np.int64)

    def __len__(self) -> int:
        return len(self.counts)

    def __getitems__(self, indices: list[int]) -> Batch:
        """Ids and what counts, [rows, length]."""
        counted = self.rows.counted[indices]
        # The last place that counts is followed by one more token, which it is to tell.
        length = int(np.flatnonzero(counted.any(0))[-1]) + 2
        return [torch.from_numpy(self.rows.ids[indices, :length]), torch.from_numpy(counted[:, :length])]


class Completion:
    """Cross-entropy of completions' tokens; the mean is over the tokens of a step, so that a long completion weighs more than a short one."""

    measure = "cross_entropy"

    def __init__(self, rows: Completions, held_out: Completions) -> None:
        """
        Raises:
            OptionError: no rows, of two lengths, in both sets, or one without a token that counts.
        """
        check_rows(rows.ids, held_out.ids)
        for name, given in (("training rows", rows), ("held-out rows", held_out)):
            empty = np.flatnonzero(~given.counted.any(1))
            if len(empty):
                raise OptionError(f"{name}, row {empty[0]}", "no token of its completion is in it", "Leave it out, or let rows be longer")
        self.rows, self.held_out = CompletionRows(rows), CompletionRows(held_out)

    def check(self, student: Any) -> None:
        columns, largest = logits.vocabulary_of(student), max(int(r.rows.ids.max()) for r in (self.rows, self.held_out))
        if largest >= columns:
            raise OptionError("training rows", f"they hold token {largest}, the student has {columns}", "Use the student's tokenizer")

    def identity(self) -> dict[str, Any]:
        both = (("rows", self.rows.rows), ("held_out_rows", self.held_out.rows))
        return {name: digest(rows.ids) + digest(rows.counted) for name, rows in both}

    def loss(self, student: Any, reading: logits.Reading, batch: Batch) -> torch.Tensor:
        ids, counted = batch
        return summed_cross_entropy(student, reading, ids, counted)


def check_rows(rows: NDArray[Any], held_out: NDArray[Any]) -> None:
    """
    Raises:
        OptionError: no rows, of two lengths, or in both sets.
    """
    for name, given in (("training rows", rows), ("held-out rows", held_out)):
        if given.ndim != 2 or not given.size:
            raise OptionError(name, f"they have the shape {given.shape}", "Give at least one row of at least one token")
    if rows.shape[1] != held_out.shape[1]:
        raise OptionError(
            "held-out rows", f"they have {held_out.shape[1]} tokens, the training rows {rows.shape[1]}", "Cut both to one length"
        )
    both = {row.tobytes() for row in rows.astype(np.int64)} & {row.tobytes() for row in held_out.astype(np.int64)}
    if both:
        raise OptionError("held-out rows", f"{len(both)} of them are training rows too", "Leave them out of one of the two")
