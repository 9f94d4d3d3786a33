"""The export path: source -> Checkpoint -> ModelGraph -> Plan -> Layout -> compressed tensors -> Bundle -> Report.

Everything that can be known without reading a weight is checked before one is read.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from llmcomp import checkpoint as checkpoints
from llmcomp import formats, kernels, planning
from llmcomp.algorithms import sensitivity
from llmcomp.algorithms.search import search
from llmcomp.budgeting import Budgeting, Judged
from llmcomp.calibrating import calibrate, inner_folds, input_power
from llmcomp.calibration import Samples, samples_of, self_text, starts_of
from llmcomp.calibration.load import AUTO, row_length
from llmcomp.checkpoint import Checkpoint
from llmcomp.errors import BudgetError
from llmcomp.fitting import fit_tables
from llmcomp.folding import choose_folds, fold
from llmcomp.graph.factors import NO_FACTORS, Factors
from llmcomp.graph.folds import Fold
from llmcomp.graph.layer import Layer
from llmcomp.graph.model import ModelGraph, flat_rows
from llmcomp.graph.sections import Sections, divide, take_orders
from llmcomp.graph.skeleton import get_skeleton
from llmcomp.judge import JudgeError
from llmcomp.judge.text import Text
from llmcomp.judging import BUDGET_WINDOWS, T95, check_judgeable, judge
from llmcomp.measuring import measure
from llmcomp.options import ExportOptions
from llmcomp.permuting import choose_inner, permute
from llmcomp.planning import Measured, Plan, Scheme
from llmcomp.progress import Progress
from llmcomp.writing import verify
from llmcomp.writing.bundle import bundle, check_disk, check_output
from llmcomp.writing.finite import check_kept, non_finite_error
from llmcomp.writing.forecast import Forecast, forecast, least_bytes
from llmcomp.writing.ir import write_ir
from llmcomp.writing.journal import NAME as JOURNAL
from llmcomp.writing.journal import Journal
from llmcomp.writing.layout import Layout, make_layout
from llmcomp.writing.report import Compressed, make_report, write_report
from llmcomp.writing.side_files import write_side_files
from llmcomp.writing.stream import BinWriter, Outcome, Quantizer, tile_rows
from llmcomp.writing.tokenizer import Conversion

RULES: dict[str, str | kernels.Ranges] = {planning.SEARCH: search}
"""Rules that are algorithms; the others are the formats' own."""
LOST = 0.9
"""Relative squared error from which on nothing of a layer is left: no scale is below 2^-23, and a table may lack what the weights are."""
REPORTED_VERSIONS = ("llmcomp", "openvino", "openvino-tokenizers", "optimum", "optimum-intel", "transformers", "torch")


@dataclass(frozen=True)
class Result:
    """A finished export."""

    output: Path
    report: Mapping[str, Any]


@dataclass
class _Run:
    """What the stages of one run share: how to tell, and how long each took."""

    progress: Progress
    seconds: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    used: Samples | None = None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.progress.stage(name)
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def warn(self, text: str) -> None:
        if text in self.warnings:
            return
        self.warnings.append(text)
        self.progress.warn(text)

    def use(self, samples: Samples) -> None:
        """Tell once what text is looked at."""
        if samples is not self.used:
            self.progress.note(f"calibration data: {samples}")
            for text in samples.warnings:
                self.warn(text)
        self.used = samples


def export(options: ExportOptions, progress: Progress | None = None) -> Result:
    """Compress `options.model` into the folder `options.output`.

    Raises:
        LlmcompError: before any weight is read where that can be known; then no output folder is left either.
    """
    assert options.output is not None
    run = _Run(progress or Progress())
    with run.stage("checks"):
        planning.check_options(options)
        check_output(options.output, options.model, options.overwrite)
        checkpoint = _open(options)
        text = None
        if options.eval or options.max_loss is not None:
            text = check_judgeable(checkpoint, options.eval_dataset, "--eval" if options.eval else "--max-loss")
        check_disk(options.output, least_bytes(checkpoint, options))
        samples = samples_of(options, checkpoint) if options.dataset not in (None, AUTO) else None
    with bundle(options.output, options.overwrite) as folder, ExitStack() as stack:
        tokenizer = None
        if not options.no_tokenizer:
            # It is converted in a process of its own, while the graph is traced.
            checkpoint.save_tokenizer(folder)
            tokenizer = stack.enter_context(Conversion(folder, options.task, options.trust_remote_code))
        graph = _graph(checkpoint, options, run)
        data = _Data(checkpoint, options, folder, run, tokenizer, samples)
        budgeting = _budgeting(graph, options, data, run) if options.budget else None
        plan = budgeting.plan if budgeting else _plan(graph, options, data, run)

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

        xml = folder / "openvino_model.xml"
        while True:
            written = _write(graph, plan, data, folder, run)
            if budgeting is None or not budgeting.misses(xml, judge_now):
                break
            plan = budgeting.plan
            run.progress.note("the budget is not met yet: the model is made anew")
        with run.stage("verify"):
            layout, done = written.layout, written.done
            matrices = [layer for layer, _ in planning.stored(graph.layers, _schemes(written.plan))]
            verified = verify.verify(
                verify.choose(options.verify, layout.size), xml, folder / JOURNAL, matrices, layout, done.tail, graph.vocabulary
            )
            (folder / JOURNAL).unlink()
        evaluation = budgeting.evaluation if budgeting else None
        if evaluation is None and options.eval and text is not None:
            evaluation = _judge(options, checkpoint, folder, text, run)
        nbytes = xml.with_suffix(".bin").stat().st_size
        settings = options.model_dump(mode="json", exclude={"token", "output", "quiet", "json_log", "dry_run", "overwrite"})
        report = make_report(graph, written.plan, layout, done, settings, versions(), run.seconds, verified, run.warnings, nbytes)
        report["evaluation"] = evaluation
        report["budget"] = budgeting.told() if budgeting else None
        write_report(report, folder)
    run.progress.finish()
    return Result(options.output, report)


@dataclass
class _Data:
    """Calibration data, made when it is first asked for."""

    checkpoint: Checkpoint
    options: ExportOptions
    folder: Path
    run: _Run
    tokenizer: Conversion | None
    samples: Samples | None

    def finish_tokenizer(self) -> None:
        """The tokenizer's files are in the folder, if they are wanted at all."""
        if self.tokenizer is not None:
            with self.run.stage("tokenizer"):
                self.tokenizer.finish()
            self.tokenizer = None

    def get(self) -> Samples:
        self.finish_tokenizer()
        if self.samples is None:
            with self.run.stage("own text"):
                self.samples = _own_text(self.checkpoint, self.options, self.folder)
        self.run.use(self.samples)
        return self.samples

    def check_used(self) -> None:
        """Warns of data that nothing has asked for."""
        if self.samples is not None and self.run.used is None:
            self.run.warn(f"{self.samples.source} is not used: nothing in the plan looks at data")


@dataclass(frozen=True)
class _Written:
    """A model in the folder, and the plan without what calibration could not reach."""

    plan: Plan
    layout: Layout
    done: Compressed


def _write(graph: ModelGraph, plan: Plan, data: _Data, folder: Path, run: _Run) -> _Written:
    """Compress by this plan, in place of what an earlier one has left in the folder."""
    options = data.options
    sections, plan = _sections(graph, plan, run)
    schemes, folds = _schemes(plan), choose_folds(graph, plan)
    folds = folds if sections is None else inner_folds(folds, sections)
    layout = make_layout(graph, schemes, folds)
    for name in (JOURNAL, "openvino_model.bin"):
        (folder / name).unlink(missing_ok=True)
    check_disk(options.output or folder, layout.size)
    data.finish_tokenizer()
    samples = data.get() if sections is not None else None
    data.check_used()
    with run.stage("permute"):
        graph, permuted = permute(graph, choose_inner(graph, plan), _workers())
        if sections is not None:
            take_orders(sections, graph)
    done = replace(_compress(graph, plan, layout, folds, sections, samples, folder, run), permuted=permuted)
    with run.stage("write"):
        write_ir(graph, schemes, layout, done.tail, folder / "openvino_model.xml", _rt_info(options, plan))
        write_side_files(graph, plan, options, folder)
    return _Written(plan, layout, done)


def plan_model(options: ExportOptions, progress: Progress | None = None) -> Plan:
    """The plan that `export` would follow at first, with exact sizes."""
    run = _Run(progress or Progress())
    planning.check_options(options)
    with _prepared(options, run, planning.needs_data(options)) as (graph, data):
        return _planned(graph, options, data, run)


def measure_model(options: ExportOptions, progress: Progress | None = None) -> Measured:
    """What each layer suffers under `planning.candidates(options)`, by `options.dataset` or the model's own text."""
    run = _Run(progress or Progress())
    schemes = planning.candidates(options)
    with _prepared(options, run, True) as (graph, data):
        measured = _measure(graph, options, run, data.get(), schemes)
    run.progress.finish()
    return measured


def dry_run(options: ExportOptions, progress: Progress | None = None) -> Forecast:
    """Size, memory and time of an export, without writing anything but the cached skeleton."""
    assert options.output is not None
    run = _Run(progress or Progress())
    planning.check_options(options)
    check_output(options.output, options.model, options.overwrite)
    with _prepared(options, run, planning.needs_data(options)) as (graph, data):
        plan = _planned(graph, options, data, run)
    if plan.is_calibrated:
        run.warn("calibration's own time and memory are not in the forecast, which is that of rounding the same layers plainly")
    layout = make_layout(graph, _schemes(plan), choose_folds(graph, plan))
    check_disk(options.output, layout.size)
    plain, _ = plan.without_calibration(())
    return forecast(graph, _schemes(plain), layout, _quantizer(NO_FACTORS), _workers())


@contextmanager
def _prepared(options: ExportOptions, run: _Run, looks_at_data: bool) -> Iterator[tuple[ModelGraph, _Data]]:
    """A graph and its data, where no folder is to be filled."""
    checkpoint = _open(options)
    named = looks_at_data and options.dataset not in (None, AUTO)
    samples = samples_of(options, checkpoint) if named else None
    with TemporaryDirectory(prefix="llmcomp-own-text-") as folder:
        if looks_at_data and not named and not options.no_tokenizer:
            checkpoint.save_tokenizer(Path(folder))
        yield _graph(checkpoint, options, run), _Data(checkpoint, options, Path(folder), run, None, samples)


def _planned(graph: ModelGraph, options: ExportOptions, data: _Data, run: _Run) -> Plan:
    return _budgeting(graph, options, data, run).plan if options.budget else _plan(graph, options, data, run)


def _open(options: ExportOptions) -> Checkpoint:
    checkpoint = checkpoints.open(options.model, revision=options.revision, token=options.token, cache_dir=options.cache_dir)
    if not options.no_tokenizer:
        checkpoint.check_tokenizer()
    return checkpoint


def _graph(checkpoint: Checkpoint, options: ExportOptions, run: _Run) -> ModelGraph:
    with run.stage("graph"):
        skeleton = get_skeleton(checkpoint, options.task, options.trust_remote_code)
        graph = ModelGraph(skeleton, checkpoint)
        check_kept(graph, kernels.non_finite)
    if skeleton.cached:
        run.progress.note("the traced graph comes from the cache")
    if skeleton.fallback:
        run.warn(f"traced over the mapped weights, not as an empty skeleton: {skeleton.fallback}")
    if graph.unused:
        run.warn(
            f"{len(graph.unused)} tensors of the checkpoint are not used by the architecture, {graph.unused[0]} for one; all are in the report"
        )
    return graph


def _plan(graph: ModelGraph, options: ExportOptions, data: _Data, run: _Run) -> Plan:
    measured = _measured(graph, options, data, run)
    with run.stage("plan"):
        if options.plan is not None:
            where = f"plan {options.plan}"
            return Plan.from_json(_text(options.plan), where).check_against(graph.layers, where)
        scores = None
        if measured is not None:
            scores = measured.scores(options.sensitivity_metric)
        elif planning.needs_scores(options):
            scores = _scores(graph, options)
        plan = planning.make_plan(graph.layers, options, scores, measured)
    _tell(graph, plan, run)
    return plan


def _tell(graph: ModelGraph, plan: Plan, run: _Run) -> None:
    for note in plan.notes:
        run.progress.note(note)
    by_name = {layer.name: layer for layer in graph.layers}
    stored_only = sorted({entry.format for entry in plan.layers if not planning.runs_packed(by_name[entry.name], entry.scheme)})
    if stored_only:
        run.progress.note(f"{', '.join(stored_only)}: stored only on this device, the CPU decompresses it to f32 when it loads the model")


def _budgeting(graph: ModelGraph, options: ExportOptions, data: _Data, run: _Run) -> Budgeting:
    """The way to the asked budget, its first plan made."""
    xml_bytes = partial(_xml_bytes, graph, options)
    if options.sensitivity is None:
        with run.stage("plan"):
            # A size that nothing which is going to be measured fits into is refused before that.
            Budgeting(graph, options, planning.not_measured(graph.layers, planning.candidates(options)), xml_bytes)
    measured = _measured(graph, options, data, run)
    assert measured is not None
    with run.stage("plan"):
        budgeting = Budgeting(graph, options, measured, xml_bytes)
        budgeting.begin()
    _tell(graph, budgeting.plan, run)
    return budgeting


def _measured(graph: ModelGraph, options: ExportOptions, data: _Data, run: _Run) -> Measured | None:
    """What the plan must know about layers, from the file or measured now; None if that takes no data."""
    if options.sensitivity is not None:
        where = f"sensitivity file {options.sensitivity}"
        return Measured.from_json(_text(options.sensitivity), where).check_against(graph.layers, where)
    if not planning.needs_data(options):
        return None
    by_loss = planning.ranked_by_loss(options) if options.sensitivity_metric == planning.PREDICTED else ()
    return _measure(graph, options, run, data.get(), planning.candidates(options) if options.budget else by_loss)


def _xml_bytes(graph: ModelGraph, options: ExportOptions, plan: Plan) -> int:
    """Size of the .xml that this plan gives, but for scales that may turn out to need f32."""
    schemes = _schemes(plan)
    layout = make_layout(graph, schemes, choose_folds(graph, plan))
    with TemporaryDirectory(prefix="llmcomp-xml-") as folder:
        xml = Path(folder) / "openvino_model.xml"
        write_ir(graph, schemes, layout, {}, xml, _rt_info(options, plan))
        return xml.stat().st_size


def _text(path: Path) -> str:
    return path.read_bytes().decode("utf8", "replace")


def _measure(graph: ModelGraph, options: ExportOptions, run: _Run, samples: Samples, schemes: Sequence[Scheme]) -> Measured:
    """What the samples say of each layer; with no schemes NNCF's metrics alone."""
    run.use(samples)

    def check(layer: Layer, rows: Any) -> None:
        if kernels.non_finite(rows)[0]:
            raise non_finite_error(graph, layer, kernels.non_finite, tile_rows(layer.shape[-1]))

    run.progress.start(sum(layer.size for layer in graph.layers), "weights")
    try:
        with run.stage("measure"), TemporaryDirectory(prefix="llmcomp-measure-") as scratch:
            measured, warnings = measure(graph, samples, schemes, options.probe_tokens, check, Path(scratch), run.progress.advance)
    finally:
        kernels.clear_cache()
    for text in warnings:
        run.warn(text)
    return measured


def _scores(graph: ModelGraph, options: ExportOptions) -> dict[str, float]:
    """Data-free sensitivity, streamed, of the layers that a ratio is about."""
    ranked = [layer for layer in graph.layers if options.all_layers or not (layer.last or "Gather" in layer.ops)]
    return {layer.name: sensitivity.weight_quantization_error(sensitivity.int8_error(_tiles(graph, layer))) for layer in ranked}


def _tiles(graph: ModelGraph, layer: Layer) -> Iterator[Any]:
    rows, step = flat_rows(layer), tile_rows(layer.shape[-1])
    return (graph.rows(layer, start, min(start + step, rows)) for start in range(0, rows, step))


def _schemes(plan: Plan) -> dict[str, Scheme]:
    return {entry.name: entry.scheme for entry in plan.layers}


def _quantizer(factors: Factors) -> Quantizer:
    """The kernel for one tile of a layer under its scheme."""

    def quantize(layer: Layer, scheme: Scheme, w: Any, start: int) -> kernels.Tile:
        rows = factors.rows.get(layer.name)
        given = kernels.Given(factors.columns.get(layer.name), None if rows is None else rows[start : start + len(w)])
        return kernels.quantize_rows(formats.get(scheme.format), w, scheme.group_size, RULES.get(scheme.rule, scheme.rule), given)

    return quantize


def _sections(graph: ModelGraph, plan: Plan, run: _Run) -> tuple[Sections | None, Plan]:
    """The sections that calibration runs, and the plan without what it cannot reach; None if the plan asks for no calibration."""
    if not plan.is_calibrated:
        return None, plan
    with run.stage("divide"):
        schemes = _schemes(plan)
        sections = divide(graph, lambda layer: schemes[layer.name].is_calibrated or planning.is_low(schemes[layer.name].format))
        reached = {name for section in sections.parts for site in section.sites for name in site}
        plan, missed = plan.without_calibration(reached)
    if sections.undivided:
        run.warn(f"calibrated in one pass over the whole model, in memory: {sections.undivided}")
    if missed:
        run.warn(f"{len(missed)} layers are not calibrated, {missed[0]} for one: what they read is not seen block by block")
    return sections, plan


def _own_text(checkpoint: Checkpoint, options: ExportOptions, folder: Path) -> Samples:
    """Text that the model's own data-free int4 result writes; `folder` has the tokenizer, and room for that model while it writes."""
    with TemporaryDirectory(prefix=".own-text-", dir=folder) as scratch:
        same = options.model_dump(include={"model", "task", "revision", "cache_dir", "trust_remote_code"})
        plain = Path(scratch) / "int4"
        export(ExportOptions(**same, token=options.token, output=plain, no_tokenizer=True, verify="none"))
        stored = checkpoint.folder / "generation_config.json" if checkpoint.folder is not None else None
        generation = json.loads(stored.read_text(encoding="utf8")) if stored is not None and stored.is_file() else None
        starts = starts_of(checkpoint.config, generation, None if options.no_tokenizer else folder)
        return self_text(plain, starts, options.num_samples, row_length(options, checkpoint.config), options.seed)


def _compress(
    graph: ModelGraph,
    plan: Plan,
    layout: Layout,
    folds: tuple[Fold, ...],
    sections: Sections | None,
    samples: Samples | None,
    folder: Path,
    run: _Run,
) -> Compressed:
    schemes = _schemes(plan)
    matrices = {layer.name: (layer, scheme) for layer, scheme in planning.stored(graph.layers, schemes)}

    def tell(layer: Layer, outcome: Outcome) -> None:
        _, scheme = matrices[layer.name]
        run.progress.layer(layer.name, scheme.format, outcome.seconds, group_size=scheme.group_size, error=outcome.error)
        if outcome.error > LOST:
            run.warn(
                f"{layer.name}: {scheme.format} keeps nothing of it (relative squared error {outcome.error:.2f}): its weights are below "
                f"the least step, or no match for the table; --override '{layer.name}=keep' leaves it as it is"
            )

    path, calibrated = folder / "openvino_model.bin", None
    run.progress.start(sum(layer.size for layer, _ in matrices.values()), "weights")
    try:
        with (
            Journal(folder / JOURNAL) as journal,
            BinWriter(graph, schemes, layout, path, kernels.non_finite, journal, _workers(), tell, run.progress.advance) as writer,
        ):
            if sections is None or samples is None:
                with run.stage("fold"):
                    factors, folded = fold(graph, plan, folds, _workers())
            else:
                with run.stage("calibrate"), TemporaryDirectory(prefix=".calibration-", dir=folder) as scratch:
                    seen = _share_tables(graph, plan, folds, sections, samples, writer, Path(scratch))
                    calibrated = calibrate(graph, seen, folds, sections, samples.rows, writer.put, writer.check_finite, Path(scratch))
                    factors, folded = calibrated.factors, calibrated.folds
            with run.stage("compress"):
                rest = [layer for layer in graph.layers if layer.name not in writer.outcomes]
                tables = fit_tables(graph, schemes, rest, factors, plan.tables == "blocks", workers=_workers())
                writer.stream(rest, _quantizer(factors), factors, tables)
                tail = writer.finish(factors)
            return Compressed(writer.outcomes, tail, folded, calibrated.layers if calibrated else {})
    finally:
        kernels.clear_cache()


def _share_tables(
    graph: ModelGraph, plan: Plan, folds: tuple[Fold, ...], sections: Sections, samples: Samples, writer: BinWriter, scratch: Path
) -> Plan:
    """The plan with a codebook for the calibrated layers that share one across blocks: those must all be seen before the first is rounded."""
    wanted = {entry.name for entry in plan.layers if entry.format == formats.ADAPTIVE and entry.scheme.is_calibrated}
    if plan.tables != "blocks" or not wanted:
        return plan
    moments = input_power(graph, plan, sections, samples.rows, writer.check_finite, scratch)
    # Factors by data are chosen later, block by block; these make the columns nearly as alike.
    factors, _ = fold(graph, plan, folds, _workers())
    layers = [layer for layer in graph.layers if layer.name in wanted]
    tables = fit_tables(graph, _schemes(plan), layers, factors, True, moments, _workers())
    entries = tuple(entry.model_copy(update={"format": tables.get(entry.name, entry.format)}) for entry in plan.layers)
    return plan.model_copy(update={"layers": entries})


def _judge(options: ExportOptions, checkpoint: Checkpoint, folder: Path, text: Text, run: _Run) -> dict[str, Any] | None:
    """Figures for the report. A model that is written and verified is not thrown away because the float one does not run here."""
    with run.stage("judge"):
        try:
            return judge(folder, checkpoint, options.trust_remote_code, run.progress, text)
        except JudgeError as error:
            run.warn(f"not judged: {error}")
            return None


def _workers() -> int:
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def _rt_info(options: ExportOptions, plan: Plan) -> dict[str, Any]:
    settings = options.model_dump(mode="json", include=planning.COMPRESSION_FIELDS)
    return {
        "version": version_of("llmcomp"),
        "weight_compression": settings,
        "layers": ", ".join(f"{name}: {n}" for name, n in plan.counts().items()),
    }


def versions() -> dict[str, str]:
    return {name: version_of(name) for name in REPORTED_VERSIONS}


def version_of(package: str) -> str:
    if package == "llmcomp":
        from llmcomp import __version__

        return __version__
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
