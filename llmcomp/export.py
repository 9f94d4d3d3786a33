"""The export path: source -> Checkpoint -> ModelGraph -> Plan -> Layout -> compressed tensors -> Bundle -> Report.

Everything that can be known without reading a weight is checked before one is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from llmcomp import planning
from llmcomp.budgeting import Judged
from llmcomp.calibration import Samples, samples_of
from llmcomp.calibration.load import AUTO, row_length
from llmcomp.checkpoint import Checkpoint
from llmcomp.compressing import Written, divided, quantizer, write_model
from llmcomp.deciding import check_files, decide, measure_layers, plan_by_rules, start_budget
from llmcomp.errors import BudgetError
from llmcomp.folding import choose_folds
from llmcomp.forecasting import calibration_needs, shortages, with_calibration
from llmcomp.graph.factors import NO_FACTORS
from llmcomp.graph.model import ModelGraph
from llmcomp.judge import JudgeError
from llmcomp.judge.text import Text
from llmcomp.judging import BUDGET_WINDOWS, T95, check_judgeable, judge
from llmcomp.options import ExportOptions, command_line
from llmcomp.planning import Measured, Plan
from llmcomp.preparing import Data, Graphs, only, open_checkpoint, prepared, trace
from llmcomp.progress import Progress
from llmcomp.running import Run
from llmcomp.threads import workers
from llmcomp.writing import resume, verify
from llmcomp.writing.bundle import bundle, check_disk, check_output, partial_folder
from llmcomp.writing.forecast import Forecast, forecast, least_bytes, total
from llmcomp.writing.layout import make_layout
from llmcomp.writing.report import Submodel, make_report, versions, write_report
from llmcomp.writing.side_files import write_side_files
from llmcomp.writing.tokenizer import Conversion

OF_THE_RUN = {"token", "output", "quiet", "json_log", "dry_run", "overwrite", "resume", "min_share"}
"""Options that leave the result as it is."""


@dataclass(frozen=True)
class Result:
    """A finished export."""

    output: Path
    report: Mapping[str, Any]


Observe = Callable[[ModelGraph, Written, Path], None]
"""Is shown a graph and what has been written of it into a folder."""
Consider = Callable[[Graphs, Plan], None]
"""Is shown what is going to be written; what it raises ends the export."""


def export(
    options: ExportOptions, progress: Progress | None = None, observe: Observe | None = None, consider: Consider | None = None
) -> Result:
    """Compress `options.model` into the folder `options.output`. `consider` sees the plan before a weight is compressed, `observe` each submodel when it
    is verified, before the folder is there.

    Raises:
        LlmcompError: before any weight is read where that can be known; then no output folder is left either.
    """
    assert options.output is not None
    run = Run(progress or Progress())
    with run.stage("checks"):
        planning.check_options(options)
        check_files(options)
        check_output(options.output, options.model, options.overwrite)
        checkpoint = open_checkpoint(options)
        text = None
        if options.eval or options.max_loss is not None:
            text = check_judgeable(checkpoint, options.eval_dataset, "--eval" if options.eval else "--max-loss")
        check_disk(options.output, least_bytes(checkpoint, options))
        samples = samples_of(options, checkpoint) if options.dataset not in (None, AUTO) else None
        identity = _identity(options, checkpoint, samples)
        if options.resume:
            resume.check(partial_folder(options.output), identity)
    with bundle(options.output, options.overwrite, identity, options.resume) as folder, ExitStack() as stack:
        unfinished = resume.Unfinished(folder)
        tokenizer = None
        if not options.no_tokenizer:
            # It is converted in a process of its own, while the graph is traced.
            checkpoint.save_tokenizer(folder)
            tokenizer = stack.enter_context(Conversion(folder, options.task, options.trust_remote_code))
        graphs = trace(checkpoint, options, run)
        data = Data(checkpoint, options, folder, run, tokenizer, samples, export, unfinished)
        budgeting = start_budget(graphs[0], options, data, run) if options.budget else None
        plan = budgeting.plan if budgeting else plan_by_rules(graphs, options, data, run)
        plan.check_reached()
        if consider is not None:
            consider(graphs, plan)

        def judge_now() -> Judged:
            assert text is not None
            with run.stage("judge"):
                try:
                    figures = judge(folder, checkpoint, options.trust_remote_code, run.progress, text, BUDGET_WINDOWS)
                except JudgeError as error:
                    raise BudgetError(
                        f"--max-loss {options.max_loss:g}", f"the model cannot be judged: {error}", "Use --target-size"
                    ) from None
            return Judged(figures["kl"], figures["kl"] + T95 * figures["kl_standard_error"], figures)

        while True:
            # A budget is for a model of one graph.
            written = {graph: write_model(graph, plan.of(graph.layers), data, folder, run) for graph in graphs}
            write_side_files(checkpoint, graphs[0].skeleton, plan, options, folder)
            if budgeting is None or not budgeting.misses(folder / f"{graphs[0].skeleton.name}.xml", judge_now):
                break
            plan = budgeting.plan
            run.progress.note("the budget is not met yet: the model is made anew")
        with run.stage("verify"):
            mode = verify.choose(options.verify, sum(one.layout.size for one in written.values()))
            verified = {graph: _verify(mode, folder, graph, one) for graph, one in written.items()}
        if observe is not None:
            for graph, one in written.items():
                observe(graph, one, folder)
        evaluation = budgeting.evaluation if budgeting else None
        if evaluation is None and options.eval and text is not None:
            evaluation = _judge(options, checkpoint, folder, text, run)
        settings = options.model_dump(mode="json", exclude=OF_THE_RUN)
        report = make_report(
            [
                Submodel(graph, one.plan, one.done, verified[graph], (folder / f"{graph.skeleton.name}.bin").stat().st_size)
                for graph, one in written.items()
            ],
            plan,
            settings,
            versions(),
            run.seconds,
            run.warnings,
            None if run.used is None else run.used.told(),
        )
        report["command"] = command_line(options)
        report["evaluation"] = evaluation
        report["budget"] = budgeting.told() if budgeting else None
        write_report(report, folder)
    run.progress.finish()
    return Result(options.output, report)


def plan_model(options: ExportOptions, progress: Progress | None = None) -> Plan:
    """The plan that `export` would follow at first, with exact sizes."""
    run = Run(progress or Progress())
    planning.check_options(options)
    check_files(options)
    with prepared(options, run, planning.needs_data(options), export) as (graphs, data):
        return decide(graphs, options, data, run)


def measure_model(options: ExportOptions, progress: Progress | None = None) -> Measured:
    """What each layer suffers under `planning.candidates(options)`, by `options.dataset` or the model's own text."""
    run = Run(progress or Progress())
    schemes = planning.candidates(options)
    with prepared(options, run, True, export) as (graphs, data):
        measured = measure_layers(only(graphs, "llmcomp measure"), options, run, data.get(), schemes)
    run.progress.finish()
    return measured


def dry_run(options: ExportOptions, progress: Progress | None = None) -> Forecast:
    """Size, memory and time of an export, without writing anything but the cached skeleton; warns of what this machine has too little of."""
    assert options.output is not None
    run = Run(progress or Progress())
    found, _, _ = foreseen(options, run)
    for text in shortages(found, options.output):
        run.warn(text)
    return found


def foreseen(options: ExportOptions, run: Run) -> tuple[Forecast, Graphs, Plan]:
    """The forecast of an export, and the graphs and the plan that it is of."""
    assert options.output is not None
    planning.check_options(options)
    check_files(options)
    check_output(options.output, options.model, options.overwrite)
    with prepared(options, run, planning.needs_data(options), export) as (graphs, data):
        plan = decide(graphs, options, data, run)
        plan.check_reached()
    found = total([_forecast(graph, plan.of(graph.layers), options, run) for graph in graphs])
    if plan.share is not None:
        found = replace(found, share=plan.share.value)
    return found, graphs, plan


def _forecast(graph: ModelGraph, plan: Plan, options: ExportOptions, run: Run) -> Forecast:
    sections, plan = divided(graph, plan, run)
    layout = make_layout(graph, plan.schemes, choose_folds(graph, plan))
    plain, _ = plan.without_calibration(())
    found = forecast(graph, plain.schemes, layout, quantizer(NO_FACTORS), workers())
    if sections is None:
        return found
    tokens = options.num_samples * row_length(options, graph.checkpoint.config)
    return with_calibration(found, calibration_needs(sections, plan, tokens))


def _identity(options: ExportOptions, checkpoint: Checkpoint, samples: Samples | None) -> dict[str, Any]:
    """What the work is, for a run that goes on with it: any of this may change bytes."""
    same = options.model_dump(
        mode="json", exclude={*OF_THE_RUN, "model", "revision", "cache_dir", "adapter", "dataset", "verify", "eval", "quality", "recipe"}
    )
    files = {"plan": options.plan, "sensitivity": options.sensitivity, "eval_dataset": options.eval_dataset}
    contents = {name: xxhash.xxh3_128_hexdigest(path.read_bytes()) if path else None for name, path in files.items()}
    return {
        "the source": checkpoint.fingerprint(),
        "the calibration data": samples.digest() if samples else options.dataset,
        **{f"--{field.replace('_', '-')}": value for field, value in {**same, **contents}.items()},
        **{f"the version of {name}": version for name, version in versions().items()},
        "the number of threads": workers(),
    }


def _verify(mode: str, folder: Path, graph: ModelGraph, one: Written) -> str:
    name = graph.skeleton.name
    matrices = [layer for layer, _ in planning.stored(graph.layers, one.plan.schemes)]
    journal = resume.Unfinished(folder, name).journal
    layout, tail = one.layout, one.done.tail
    return verify.verify(mode, folder / f"{name}.xml", journal, matrices, layout, tail, graph.vocabulary, graph.skeleton.example)


def _judge(options: ExportOptions, checkpoint: Checkpoint, folder: Path, text: Text, run: Run) -> dict[str, Any] | None:
    """Figures for the report. A model that is written and verified is not thrown away because the float one does not run here."""
    with run.stage("judge"):
        try:
            return judge(folder, checkpoint, options.trust_remote_code, run.progress, text)
        except JudgeError as error:
            run.warn(f"not judged: {error}")
            return None
