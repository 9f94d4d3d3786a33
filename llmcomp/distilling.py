"""Distilling: a compressed model is trained to answer as the float one does, and left as a checkpoint without adapters.

checkpoint ── export ──> compressed model ──> student ── training on the teacher's answers ──> OUT, for `llmcomp export`
    └──── teacher, on the training text ──> cache of its answers ──┘
"""

from __future__ import annotations

import ctypes
import gc
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.calibration import samples_of
from llmcomp.calibration.load import AUTO
from llmcomp.checkpoint import Checkpoint
from llmcomp.errors import CalibrationError, OutputError
from llmcomp.export import export, foreseen
from llmcomp.foreseeing import foresee, lacks, trained_by_plan, trained_by_start
from llmcomp.options import ExportOptions
from llmcomp.options.train_options import TrainOptions
from llmcomp.preparing import open_checkpoint
from llmcomp.progress import Progress
from llmcomp.running import Run
from llmcomp.starting import begun_of
from llmcomp.training.forecast import TrainingForecast

WORK, START, BEGUN, CACHE, ADAPTER, RUNS = "training", "start", "begun.safetensors", "teacher", "adapter", "run"
RATES = {"lora": 3e-4, "weights": 3e-5, "scales": 1e-3}
"""Highest learning rates unless said; the first two by trials on SmolLM2-135M (evaluation/LOG.md)."""
MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of malloc.h."""
SCALE_RATE, NORM_RATE = 1e-4, 1e-4


@dataclass(frozen=True)
class Distilled:
    """What came of it."""

    output: Path
    first_kl: float
    best_kl: float
    best_step: int
    steps: int
    seconds: float

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
    from llmcomp.training.folder import write_checkpoint
    from llmcomp.training.loading import load_model
    from llmcomp.training.start import Begun, begin
    from llmcomp.training.teacher import write_cache

    assert options.output is not None
    run = Run(progress or Progress())
    map_large_arrays()
    out, work = options.output, options.output / WORK
    with run.stage("checks"):
        _check_output(out, options.resume)
        checkpoint = open_checkpoint(options)
        rows, held_out = training_rows(options, training, checkpoint)
    work.mkdir(parents=True, exist_ok=True)
    begun_file = work / BEGUN
    if not begun_file.is_file():

        def keep(graph: Any, written: Any, folder: Path) -> None:
            begun_of(graph, written, folder).save(begun_file.with_suffix(".partial"))

        export(_start_of(options), run.progress, keep)
        begun_file.with_suffix(".partial").rename(begun_file)
    begun = Begun.load(begun_file)
    told = foresee(checkpoint, *trained_by_start(begun.weights), training, len(rows), len(held_out), options.trust_remote_code)
    run.progress.note(f"memory: about {told.memory_bytes / 2**20:,.0f} MiB at the peak of training, beyond mapped files")
    for text in lacks(told, out):
        run.warn(text)
    identity = checkpoint.values_digest()
    with run.stage("teacher"):
        both = np.concatenate([rows, held_out])
        run.progress.start(len(both), "rows")
        cache = write_cache(
            work / CACHE,
            load_model(checkpoint, options.trust_remote_code),
            both,
            identity,
            training.top_k,
            training.microbatch_rows,
            _advance(run.progress),
        )
    give_back()
    with run.stage("train"):
        student = load_model(checkpoint, options.trust_remote_code)
        trained = begin(student, begun, list(checkpoint.tensors), *_parts(training), training.train_seed)
        if training.adapter_start is not None:
            load_adapters(student, training.adapter_start)
        choose_trainable(student, training)
        give_back()
        result = loop.train(
            student, group_of, rows, held_out, cache, settings_of(training, rows), work / RUNS, _teller(run.progress), options.resume
        )
    with run.stage("write"):
        give_back()
        still = {name: begun.weights[name] for name in begun.weights if name.removesuffix(".weight") not in set(trained)}
        if training.train == "lora":
            save_adapters(student, out / ADAPTER, options.model)
        copy_side_files(checkpoint, out)
        # Its config.json comes last: with it the folder is whole.
        write_checkpoint(student, parameter_names(student, still), out)
    shutil.rmtree(work / CACHE)
    run.progress.finish()
    return Distilled(out, result.first_kl, result.best_kl, result.best_step, result.steps, result.seconds)


def dry_run(options: ExportOptions, training: TrainOptions, progress: Progress | None = None) -> TrainingForecast:
    """What `distill` will need, without writing anything but the cached skeleton; warns of what this machine has too little of.

    Raises:
        LlmcompError: as `distill`, before it makes the start.
    """
    assert options.output is not None
    run, out = Run(progress or Progress()), options.output
    with run.stage("checks"):
        _check_output(out, options.resume)
        checkpoint = open_checkpoint(options)
        rows, held_out = training_rows(options, training, checkpoint)
    export, graphs, plan = foreseen(_start_of(options), run)
    with run.stage("forecast"):
        found = foresee(checkpoint, *trained_by_plan(graphs, plan), training, len(rows), len(held_out), options.trust_remote_code, export)
    for text in lacks(found, out):
        run.warn(text)
    run.progress.finish()
    return found


def _start_of(options: ExportOptions) -> ExportOptions:
    assert options.output is not None
    return options.model_copy(update={"output": options.output / WORK / START, "resume": False, "overwrite": True})


def _check_output(out: Path, resume: bool) -> None:
    if resume and (out / "config.json").is_file():
        raise OutputError(str(out), "its training is finished", "Export it, or train into another folder")
    if resume and not (out / WORK).is_dir():
        raise OutputError(str(out), "there is no training to go on with", "Leave out --resume")
    if not resume and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OutputError(str(out), "it exists", "Choose another folder, or --resume to go on with what is in it")


def training_rows(options: ExportOptions, training: TrainOptions, checkpoint: Checkpoint) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
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


def map_large_arrays() -> None:
    """glibc learns from what is freed to take arrays of up to 32 MiB from its heap, where small ones that stay lock the room of large ones that went: while a
    start was put into a model of 222 M weights, 700 MiB came on top of it, and 240 MiB with a threshold that stands still."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(MMAP_THRESHOLD, 1 << 20)


def give_back() -> None:
    """What lies free between arrays that were in use goes back to the system; glibc keeps it, and it would come on top of the next stage's."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _parts(training: TrainOptions) -> tuple[int, bool, bool]:
    """(rank, whether the float weights are trained, whether codes are frozen)."""
    return training.rank if training.train == "lora" else 0, training.train == "weights", training.train == "scales"


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


def settings_of(training: TrainOptions, rows: NDArray[np.int64]) -> Any:
    from llmcomp.training.settings import Settings

    rates = {
        "scales": training.scale_lr or SCALE_RATE,
        training.train: training.lr or RATES[training.train],
        "norms": training.norm_lr or NORM_RATE,
    }
    budget = {"seconds": 60 * training.minutes} if training.minutes else {"tokens": max(1, round(rows.size * training.passes))}
    same = ("batch_rows", "microbatch_rows", "eval_every", "patience", "save_every", "dtype", "gradient_checkpointing", "tensorboard")
    return Settings.of({"learning_rates": rates, **budget, "seed": training.train_seed, **{name: getattr(training, name) for name in same}})


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


def _teller(progress: Progress) -> Callable[[int, int, float, float, float], None]:
    done = 0

    def tell(step: int, total: int, loss: float, kl: float, left: float) -> None:
        nonlocal done
        if not done:
            progress.start(total, "steps")
        progress.advance(step - done)
        done = step
        progress.note(f"step {step} of {total}: loss {loss:.4f}, held-out KL {kl:.4f}, {left / 60:.1f} minutes left")

    return tell
