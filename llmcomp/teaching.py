"""Teaching, what a student learns from: rows of text with the teacher's answers, or prompts with completions.

comes in: a checkpoint, what training is told
goes out: Material; an objective of training
may import: calibration, checkpoint, errors, options, progress, running, training
read first: material_of
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.calibration import Columns, read_pairs, samples_of
from llmcomp.calibration.load import AUTO
from llmcomp.calibration.pairs import Pair
from llmcomp.checkpoint import Checkpoint
from llmcomp.errors import CalibrationError
from llmcomp.options import ExportOptions
from llmcomp.options.train_options import TrainOptions
from llmcomp.progress import Progress
from llmcomp.running import Run

Pairs = tuple[Sequence[Pair], Sequence[Pair]]
"""(to train on, held out)."""
Rows = tuple[NDArray[np.int64], NDArray[np.int64]]
"""(to train on, held out), [rows, length]."""


@dataclass(frozen=True)
class Material:
    """One of both."""

    rows: Rows | None = None
    pairs: Pairs | None = None

    @property
    def counts(self) -> tuple[int, int]:
        """Rows or pairs: to train on, held out."""
        one, other = self.rows or self.pairs or ((), ())
        return len(one), len(other)


def material_of(options: ExportOptions, training: TrainOptions, checkpoint: Checkpoint) -> Material:
    """
    Raises:
        CalibrationError: no data, less than two rows of it, or data without the columns that `--loss task` needs.
    """
    if training.loss == "task":
        return Material(pairs=training_pairs(options, training, checkpoint))
    return Material(rows=training_rows(options, training, checkpoint))


def training_pairs(options: ExportOptions, training: TrainOptions, checkpoint: Checkpoint) -> Pairs:
    """Prompts with completions, the last ones held out. Raises as `material_of`."""
    dataset = training.train_dataset or options.dataset
    if not isinstance(dataset, str) or dataset == AUTO:
        raise CalibrationError("--loss task", "it needs prompts with completions", "Give --train-dataset, a .jsonl or .parquet with both")
    columns = Columns(training.prompt_column, training.completion_column, training.chat_template)
    pairs = read_pairs(options, checkpoint, dataset, columns, training.train_length, training.train_tokens, training.held_out_rows)
    held_out = min(training.held_out_rows, len(pairs) // 2)
    if not held_out:
        found = f"it has {len(pairs)} different pairs, one to train on and one to judge by are the least"
        raise CalibrationError(dataset, found, "Give more of them")
    return pairs[:-held_out], pairs[-held_out:]


def training_rows(options: ExportOptions, training: TrainOptions, checkpoint: Checkpoint) -> Rows:
    """Disjoint windows of a text, the last ones held out. Raises as `material_of`."""
    dataset = training.train_dataset or options.dataset
    if dataset in (None, AUTO):
        raise CalibrationError("training", "it needs text", "Give --dataset, or --train-dataset")
    wanted = -(-training.train_tokens // training.train_length) + training.held_out_rows
    samples = samples_of(
        options.model_copy(update={"dataset": dataset, "num_samples": wanted, "sequence_length": training.train_length}), checkpoint
    )
    full = [row for row in samples.rows if len(row) == training.train_length]
    whole = np.unique(np.stack(full), axis=0, return_index=True)[1] if full else np.zeros(0, int)
    rows = np.stack(full)[np.sort(whole)] if full else np.zeros((0, training.train_length), np.int64)
    held_out = min(training.held_out_rows, len(rows) // 2)
    if not held_out:
        raise CalibrationError(
            samples.source, f"it has {len(rows)} different rows of {training.train_length} tokens, one to train on and one to judge by are the least",
            "Give more text, or a smaller --train-length",
        )  # fmt: skip
    return rows[:-held_out].astype(np.int64), rows[-held_out:].astype(np.int64)


def objective_of(material: Material, options: ExportOptions, training: TrainOptions, checkpoint: Checkpoint, folder: Path, run: Run) -> Any:
    """What training lowers; the teacher answers to rows here, into `folder`."""
    from llmcomp.training.completions import Completions
    from llmcomp.training.loading import load_model
    from llmcomp.training.objectives import Completion, Distillation
    from llmcomp.training.teacher import write_cache

    if material.pairs is not None:
        return Completion(*(Completions.of(part, training.train_length) for part in material.pairs))
    assert material.rows is not None
    identity = checkpoint.values_digest()
    with run.stage("teacher"):
        both = np.concatenate(material.rows)
        run.progress.start(len(both), "rows")
        teacher = load_model(checkpoint, options.trust_remote_code)
        cache = write_cache(folder, teacher, both, identity, training.top_k, training.microbatch_rows, _advance(run.progress))
    return Distillation(*material.rows, cache)


def _advance(progress: Progress) -> Callable[[int, int], None]:
    done = 0

    def tell(finished: int, _: int) -> None:
        nonlocal done
        progress.advance(finished - done)
        done = finished

    return tell
