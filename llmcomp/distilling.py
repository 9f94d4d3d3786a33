"""Distilling: a compressed model is trained to answer as the float one does, or as a task wants, and left as a checkpoint without adapters.

checkpoint ── export ──> compressed model ──> student ── training on the teacher's answers ──> OUT, for `llmcomp export`
    └──── teacher, on the training text ──> cache of its answers ──┘

With `--loss task` there is no teacher: the student learns the completions of prompts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.calibration import Columns, read_pairs, samples_of
from llmcomp.calibration.load import AUTO
from llmcomp.calibration.pairs import Pair
from llmcomp.checkpoint import Checkpoint
from llmcomp.errors import CalibrationError, OptionError, OutputError
from llmcomp.export import export
from llmcomp.options import ExportOptions
from llmcomp.options.train_options import TrainOptions
from llmcomp.preparing import open_checkpoint
from llmcomp.progress import Progress
from llmcomp.running import Run
from llmcomp.starting import begun_of

WORK, START, BEGUN, CACHE, ADAPTER, RUNS = "training", "start", "begun.safetensors", "teacher", "adapter", "run"
RATES = {"lora": 3e-4, "nls": 3e-4, "weights": 3e-5, "scales": 1e-3}
"""Highest learning rates unless said; those of lora and weights by trials on SmolLM2-135M (evaluation/LOG.md)."""
Pairs = tuple[Sequence[Pair], Sequence[Pair]]
"""(to train on, held out)."""
Rows = tuple[NDArray[np.int64], NDArray[np.int64]]
"""(to train on, held out), [rows, length]."""
SCALE_RATE, NORM_RATE = 1e-4, 1e-4


@dataclass(frozen=True)
class Distilled:
    """What came of it."""

    output: Path
    measure: str
    """KL or cross-entropy, in words."""
    first_loss: float
    best_loss: float
    best_step: int
    steps: int
    seconds: float
    ranks: Mapping[str, int]
    """Module -> rank of its adapter, where they were searched for."""

    @property
    def improved(self) -> bool:
        return self.best_step > 0


def distill(options: ExportOptions, training: TrainOptions, progress: Progress | None = None) -> Distilled:
    """Train the compressed model that `options` describe, and write it as a checkpoint into `options.output`.

    Raises:
        LlmcompError: before the start is made, where that can be known.
    """
    from llmcomp.training import distill as loop
    from llmcomp.training.adapters import load_adapters, save_adapters
    from llmcomp.training.elastic import cut
    from llmcomp.training.folder import write_checkpoint
    from llmcomp.training.loading import load_model
    from llmcomp.training.nls import Space, check_ranks
    from llmcomp.training.start import Begun, begin, low_bits

    assert options.output is not None
    run = Run(progress or Progress())
    out, work = options.output, options.output / WORK
    if options.dry_run:
        raise OptionError("--dry-run", "there is no forecast of training", "Leave it out, or give it to llmcomp export, for the start")
    with run.stage("checks"):
        _check_output(out, options.resume)
        ranks = check_ranks(training.ranks)
        checkpoint = open_checkpoint(options)
        rows = None
        if training.loss == "task":
            objective: Any = completion_of(training_pairs(options, training, checkpoint), training.train_length)
        else:
            rows = training_rows(options, training, checkpoint)
    work.mkdir(parents=True, exist_ok=True)
    begun_file = work / BEGUN
    if not begun_file.is_file():
        start = options.model_copy(update={"output": work / START, "resume": False, "overwrite": True})

        def keep(graph: Any, written: Any, folder: Path) -> None:
            begun_of(graph, written, folder).save(begun_file.with_suffix(".partial"))

        export(start, run.progress, keep)
        begun_file.with_suffix(".partial").rename(begun_file)
    begun = Begun.load(begun_file)
    if training.train == "nls":
        # A budget that nothing fits is told before the teacher reads.
        Space(ranks, tuple(sum(begun.weights[name].shape) for name in low_bits(begun))).start(training.rank_budget)
    if rows is not None:
        objective = _answered(rows, training, checkpoint, options.trust_remote_code, work / CACHE, run)
    with run.stage("train"):
        student = load_model(checkpoint, options.trust_remote_code)
        trained = begin(student, begun, list(checkpoint.tensors), *_parts(training), training.train_seed)
        if training.adapter_start is not None:
            load_adapters(student, training.adapter_start)
        choose_trainable(student, training)
        tell = _teller(run.progress, loop.WORDS[objective.measure])
        result = loop.train(student, group_of, objective, settings_of(training, objective), work / RUNS, tell, options.resume)
    with run.stage("write"):
        still = {name: weight for name, weight in begun.weights.items() if name.removesuffix(".weight") not in set(trained)}
        if result.ranks:
            cut(student)
        # A search may find that no layer needs any.
        if training.train == "lora" or any(result.ranks.values()):
            save_adapters(student, out / ADAPTER, options.model)
        copy_side_files(checkpoint, out)
        # Its config.json comes last: with it the folder is whole.
        write_checkpoint(student, parameter_names(student, still), out)
    if rows is not None:
        shutil.rmtree(work / CACHE)
    run.progress.finish()
    measure = loop.WORDS[result.measure]
    return Distilled(out, measure, result.first_loss, result.best_loss, result.best_step, result.steps, result.seconds, result.ranks)


def _check_output(out: Path, resume: bool) -> None:
    if resume and (out / "config.json").is_file():
        raise OutputError(str(out), "its training is finished", "Export it, or train into another folder")
    if resume and not (out / WORK).is_dir():
        raise OutputError(str(out), "there is no training to go on with", "Leave out --resume")
    if not resume and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OutputError(str(out), "it exists", "Choose another folder, or --resume to go on with what is in it")


def training_pairs(options: ExportOptions, training: TrainOptions, checkpoint: Checkpoint) -> Pairs:
    """Prompts with completions, the last ones held out.

    Raises:
        CalibrationError: no data, data that has no such columns, or less than two rows of it.
    """
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
    """(rows to train on, rows held out), [rows, length]: disjoint windows, the last ones held out.

    Raises:
        CalibrationError: no data, or less than two rows of it.
    """
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


def completion_of(pairs: Pairs, length: int) -> Any:
    """The objective of `--loss task`."""
    from llmcomp.training.completions import Completions
    from llmcomp.training.objectives import Completion

    return Completion(*(Completions.of(part, length) for part in pairs))


def _answered(rows: Rows, training: TrainOptions, checkpoint: Checkpoint, trust: bool, folder: Path, run: Run) -> Any:
    """The objective of `--loss kl`: the teacher answers here."""
    from llmcomp.training.loading import load_model
    from llmcomp.training.objectives import Distillation
    from llmcomp.training.teacher import write_cache

    identity = checkpoint.values_digest()
    with run.stage("teacher"):
        both = np.concatenate(rows)
        run.progress.start(len(both), "rows")
        teacher = load_model(checkpoint, trust)
        cache = write_cache(folder, teacher, both, identity, training.top_k, training.microbatch_rows, _advance(run.progress))
    return Distillation(*rows, cache)


def _parts(training: TrainOptions) -> tuple[int, bool, bool]:
    """(rank, whether the float weights are trained, whether codes are frozen)."""
    ranks = {"lora": training.rank, "nls": max(training.ranks, default=0)}
    return ranks.get(training.train, 0), training.train == "weights", training.train == "scales"


def group_of(name: str) -> str:
    """The group of a parameter's learning rate."""
    part = name.rpartition(".")[2]
    return {"gain": "scales", "lora_A": "lora", "lora_B": "lora", "original": "weights"}.get(part, "norms")


def choose_trainable(student: Any, training: TrainOptions) -> None:
    """Mark what `training` trains, besides adapters and weights: zero points stand still, they move whole groups by a step at once."""
    for name, parameter in student.named_parameters():
        if name.endswith(".zero_point"):
            parameter.requires_grad_(False)
        elif name.endswith(".gain"):
            parameter.requires_grad_(training.scale_lr != 0)
        elif parameter.ndim == 1 and ".parametrizations." not in name:
            parameter.requires_grad_(training.norm_lr != 0)


def settings_of(training: TrainOptions, objective: Any) -> Any:
    from llmcomp.training.settings import Settings

    rates = {
        "scales": training.scale_lr or SCALE_RATE,
        {"nls": "lora"}.get(training.train, training.train): training.lr or RATES[training.train],
        "norms": training.norm_lr or NORM_RATE,
    }
    tokens = max(1, round(int(objective.rows.counts.sum()) * training.passes))
    budget = {"seconds": 60 * training.minutes} if training.minutes else {"tokens": tokens}
    names = {
        "ranks": training.ranks,
        "budget": training.rank_budget,
        "evaluations": training.search_evaluations,
        "share": training.search_share,
    }
    elastic = names if training.train == "nls" else None
    same = ("batch_rows", "microbatch_rows", "eval_every", "patience", "save_every", "dtype", "gradient_checkpointing", "tensorboard")
    return Settings.of(
        {
            "learning_rates": rates,
            **budget,
            "elastic": elastic,
            "seed": training.train_seed,
            **{name: getattr(training, name) for name in same},
        }
    )


def parameter_names(student: Any, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Checkpoint tensors -> the parameters of `student` that they are."""
    from llmcomp.graph.match import find_tensor

    prefix = getattr(student, "base_model_prefix", "")
    names = {find_tensor(name, weights, prefix): name for name, _ in student.named_parameters()}
    return {names[name]: weight for name, weight in weights.items()}


def copy_side_files(checkpoint: Checkpoint, out: Path) -> None:
    """What stands beside the weights of the source."""
    if checkpoint.generation_config is not None:
        (out / "generation_config.json").write_text(json.dumps(checkpoint.generation_config, indent=2) + "\n", encoding="utf8")
    checkpoint.save_tokenizer(out)
    for path in checkpoint.side_files:
        if not (out / path.name).exists():
            shutil.copyfile(path, out / path.name)


def _advance(progress: Progress) -> Callable[[int, int], None]:
    done = 0

    def tell(finished: int, _: int) -> None:
        nonlocal done
        progress.advance(finished - done)
        done = finished

    return tell


def _teller(progress: Progress, measure: str) -> Callable[[int, int, float, float, float], None]:
    done = 0

    def tell(step: int, total: int, loss: float, held_out: float, left: float) -> None:
        nonlocal done
        if not done:
            progress.start(total, "steps")
        progress.advance(step - done)
        done = step
        progress.note(f"step {step} of {total}: loss {loss:.4f}, held-out {measure} {held_out:.4f}, {left / 60:.1f} minutes left")

    return tell
