"""Distilling: a compressed model is trained to answer as the float one does, or as a task wants, and left as a checkpoint without adapters.

checkpoint ── export ──> compressed model ──> student ── training on the teacher's answers ──> OUT, for `llmcomp export`
    └──── teacher, on the training text ──> cache of its answers ──┘

With `--loss task` there is no teacher: the student learns the completions of prompts.
"""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcomp.checkpoint import Checkpoint
from llmcomp.errors import OutputError
from llmcomp.export import export, foreseen
from llmcomp.foreseeing import foresee, lacks, trained_by_plan, trained_by_start
from llmcomp.heap import trim
from llmcomp.options import ExportOptions
from llmcomp.options.train_options import TrainOptions
from llmcomp.planning import Plan
from llmcomp.preparing import Graphs, open_checkpoint
from llmcomp.progress import Progress
from llmcomp.running import Run
from llmcomp.starting import begun_of, check_plan
from llmcomp.teaching import material_of, objective_of
from llmcomp.training.forecast import TrainingForecast

WORK, START, BEGUN, CACHE, ADAPTER, RUNS = "training", "start", "begun.safetensors", "teacher", "adapter", "run"
RATES = {"lora": 3e-4, "nls": 3e-4, "weights": 3e-5, "scales": 1e-3}
"""Highest learning rates unless said; those of lora and weights by trials on SmolLM2-135M (evaluation/LOG.md)."""
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
    from llmcomp.training.start import Begun, begin

    assert options.output is not None
    run = Run(progress or Progress())
    out, work = options.output, options.output / WORK
    with run.stage("checks"):
        _check(options, training)
        checkpoint = open_checkpoint(options)
        material = material_of(options, training, checkpoint)
    work.mkdir(parents=True, exist_ok=True)
    begun_file = work / BEGUN
    if not begun_file.is_file():

        def keep(graph: Any, written: Any, folder: Path) -> None:
            begun_of(graph, written, folder).save(begun_file.with_suffix(".partial"))

        export(_start_of(options), run.progress, keep, _considering(training))
        begun_file.with_suffix(".partial").rename(begun_file)
    begun = Begun.load(begun_file)
    told = foresee(checkpoint, *trained_by_start(begun.weights), training, material.counts, options.trust_remote_code)
    run.progress.note(f"memory: about {told.memory_bytes / 2**20:,.0f} MiB at the peak of training, beyond mapped files")
    for text in lacks(told, out):
        run.warn(text)
    objective = objective_of(material, options, training, checkpoint, work / CACHE, run)
    _give_back()
    with run.stage("train"):
        student = load_model(checkpoint, options.trust_remote_code)
        trained = begin(student, begun, list(checkpoint.tensors), *_parts(training), training.train_seed)
        if training.adapter_start is not None:
            load_adapters(student, training.adapter_start)
        choose_trainable(student, training)
        _give_back()
        tell = _teller(run.progress, loop.WORDS[objective.measure])
        result = loop.train(student, group_of, objective, settings_of(training, objective), work / RUNS, tell, options.resume)
    with run.stage("write"):
        _give_back()
        still = {name: begun.weights[name] for name in begun.weights if name.removesuffix(".weight") not in set(trained)}
        if result.ranks:
            cut(student)
        # A search may find that no layer needs any.
        if training.train == "lora" or any(result.ranks.values()):
            save_adapters(student, out / ADAPTER, options.model)
        copy_side_files(checkpoint, out)
        # Its config.json comes last: with it the folder is whole.
        write_checkpoint(student, parameter_names(student, still), out)
    if material.rows is not None:
        shutil.rmtree(work / CACHE)
    run.progress.finish()
    measure = loop.WORDS[result.measure]
    return Distilled(out, measure, result.first_loss, result.best_loss, result.best_step, result.steps, result.seconds, result.ranks)


def dry_run(options: ExportOptions, training: TrainOptions, progress: Progress | None = None) -> TrainingForecast:
    """What `distill` will need, without writing anything but the cached skeleton; warns of what this machine has too little of.

    Raises:
        LlmcompError: as `distill`, before it makes the start.
    """
    assert options.output is not None
    run = Run(progress or Progress())
    with run.stage("checks"):
        _check(options, training)
        checkpoint = open_checkpoint(options)
        material = material_of(options, training, checkpoint)
    export, graphs, plan = foreseen(_start_of(options), run)
    _considering(training)(graphs, plan)
    with run.stage("forecast"):
        found = foresee(checkpoint, *trained_by_plan(graphs, plan), training, material.counts, options.trust_remote_code, export)
    for text in lacks(found, options.output):
        run.warn(text)
    run.progress.finish()
    return found


def _considering(training: TrainOptions) -> Callable[[Graphs, Plan], None]:
    """Refuses a plan that training has no use for, before a weight of it is read."""

    def consider(graphs: Graphs, plan: Plan) -> None:
        for graph in graphs:
            check_plan(
                graph, plan.of(graph.layers), training.largest_rank, training.ranks if training.train == "nls" else (), training.rank_budget
            )

    return consider


def _start_of(options: ExportOptions) -> ExportOptions:
    assert options.output is not None
    return options.model_copy(update={"output": options.output / WORK / START, "resume": False, "overwrite": True})


def _check(options: ExportOptions, training: TrainOptions) -> None:
    from llmcomp.training.nls import check_ranks

    out, resume = options.output, options.resume
    assert out is not None
    check_ranks(training.ranks)
    if resume and (out / "config.json").is_file():
        raise OutputError(str(out), "its training is finished", "Export it, or train into another folder")
    if resume and not (out / WORK).is_dir():
        raise OutputError(str(out), "there is no training to go on with", "Leave out --resume")
    if not resume and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OutputError(str(out), "it exists", "Choose another folder, or --resume to go on with what is in it")


def _give_back() -> None:
    """What no stage needs any more, so that it does not come on top of the next one."""
    gc.collect()
    trim()


def _parts(training: TrainOptions) -> tuple[int, bool, bool]:
    """(rank, whether the float weights are trained, whether codes are frozen)."""
    return training.largest_rank, training.train == "weights", training.train == "scales"


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
