"""The export path: source -> Checkpoint -> ModelGraph -> Plan -> Layout -> compressed tensors -> Bundle -> Report.

Everything that can be known without reading a weight is checked before one is read.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from llmcomp import checkpoint as checkpoints
from llmcomp import formats, kernels, planning
from llmcomp.algorithms import sensitivity
from llmcomp.algorithms.search import search
from llmcomp.calibrating import calibrate, inner_folds, input_power
from llmcomp.calibration import Samples, samples_of, self_text, starts_of
from llmcomp.calibration.load import AUTO, row_length
from llmcomp.checkpoint import Checkpoint
from llmcomp.fitting import fit_tables
from llmcomp.folding import choose_folds, fold
from llmcomp.graph.factors import NO_FACTORS, Factors
from llmcomp.graph.folds import Fold
from llmcomp.graph.layer import Layer
from llmcomp.graph.model import ModelGraph, flat_rows
from llmcomp.graph.sections import Sections, divide
from llmcomp.graph.skeleton import get_skeleton
from llmcomp.judge import JudgeError
from llmcomp.judging import check_judgeable, judge
from llmcomp.options import ExportOptions
from llmcomp.planning import Plan, Scheme
from llmcomp.progress import Progress
from llmcomp.writing import verify
from llmcomp.writing.bundle import bundle, check_disk, check_output
from llmcomp.writing.finite import check_kept
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

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.progress.stage(name)
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started

    def warn(self, text: str) -> None:
        self.warnings.append(text)
        self.progress.warn(text)


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
        if options.eval:
            check_judgeable(checkpoint)
        check_disk(options.output, least_bytes(checkpoint, options))
        samples = samples_of(options, checkpoint) if options.dataset not in (None, AUTO) else None
    with bundle(options.output, options.overwrite) as folder, ExitStack() as stack:
        tokenizer = None
        if not options.no_tokenizer:
            # It is converted in a process of its own, while the graph is traced.
            checkpoint.save_tokenizer(folder)
            tokenizer = stack.enter_context(Conversion(folder, options.task, options.trust_remote_code))
        graph = _graph(checkpoint, options, run)
        plan = _plan(graph, options, run)
        sections, plan = _sections(graph, plan, run)
        schemes, folds = _schemes(plan), choose_folds(graph, plan)
        folds = folds if sections is None else inner_folds(folds, sections)
        layout = make_layout(graph, schemes, folds)
        check_disk(options.output, layout.size)
        if tokenizer is not None:
            with run.stage("tokenizer"):
                tokenizer.finish()
        if sections is not None and samples is None:
            with run.stage("own text"):
                samples = _own_text(checkpoint, options, folder)
        if sections is None and samples is not None:
            run.warn(f"{samples.source} is not used: nothing in the plan looks at data")
        if sections is not None and samples is not None:
            run.progress.note(f"calibration data: {samples}")
            for text in samples.warnings:
                run.warn(text)
        done = _compress(graph, plan, layout, folds, sections, samples, folder, run)
        xml = folder / "openvino_model.xml"
        with run.stage("write"):
            write_ir(graph, schemes, layout, done.tail, xml, _rt_info(options, plan))
            write_side_files(graph, plan, options, folder)
        with run.stage("verify"):
            mode = verify.choose(options.verify, layout.size)
            matrices = [layer for layer, _ in planning.stored(graph.layers, schemes)]
            verified = verify.verify(mode, xml, folder / JOURNAL, matrices, layout, done.tail, graph.vocabulary)
            (folder / JOURNAL).unlink()
        evaluation = _judge(options, checkpoint, folder, run) if options.eval else None
        nbytes = xml.with_suffix(".bin").stat().st_size
        settings = options.model_dump(mode="json", exclude={"token", "output", "quiet", "json_log", "dry_run", "overwrite"})
        report = make_report(graph, plan, layout, done, settings, versions(), run.seconds, verified, run.warnings, nbytes)
        report["evaluation"] = evaluation
        write_report(report, folder)
    run.progress.finish()
    return Result(options.output, report)


def plan_model(options: ExportOptions, progress: Progress | None = None) -> Plan:
    """The plan that `export` would follow, with exact sizes."""
    run = _Run(progress or Progress())
    return _plan(_graph(_open(options), options, run), options, run)


def dry_run(options: ExportOptions, progress: Progress | None = None) -> Forecast:
    """Size, memory and time of an export, without writing anything but the cached skeleton."""
    assert options.output is not None
    run = _Run(progress or Progress())
    check_output(options.output, options.model, options.overwrite)
    graph = _graph(_open(options), options, run)
    plan = _plan(graph, options, run)
    if plan.is_calibrated:
        run.warn("calibration's own time and memory are not in the forecast, which is that of rounding the same layers plainly")
    layout = make_layout(graph, _schemes(plan), choose_folds(graph, plan))
    check_disk(options.output, layout.size)
    plain, _ = plan.without_calibration(())
    return forecast(graph, _schemes(plain), layout, _quantizer(NO_FACTORS), _workers())


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


def _plan(graph: ModelGraph, options: ExportOptions, run: _Run) -> Plan:
    with run.stage("plan"):
        if options.plan is not None:
            where = f"plan {options.plan}"
            return Plan.from_json(options.plan.read_bytes().decode("utf8", "replace"), where).check_against(graph.layers, where)
        scores = _scores(graph, options) if planning.needs_scores(options) else None
        plan = planning.make_plan(graph.layers, options, scores)
    for note in plan.notes:
        run.progress.note(note)
    by_name = {layer.name: layer for layer in graph.layers}
    stored_only = sorted({entry.format for entry in plan.layers if not planning.runs_packed(by_name[entry.name], entry.scheme)})
    if stored_only:
        run.progress.note(f"{', '.join(stored_only)}: stored only on this device, the CPU decompresses it to f32 when it loads the model")
    return plan


def _scores(graph: ModelGraph, options: ExportOptions) -> dict[str, float]:
    """Data-free sensitivity, streamed, of the layers that a ratio is about."""
    ranked = [layer for layer in graph.layers if options.all_layers or not (layer.last or "Gather" in layer.ops)]
    return {layer.name: sensitivity.weight_quantization_error(_tiles(graph, layer)) for layer in ranked}


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


def _judge(options: ExportOptions, checkpoint: Checkpoint, folder: Path, run: _Run) -> dict[str, Any] | None:
    """Figures for the report. A model that is written and verified is not thrown away because the float one does not run here."""
    with run.stage("judge"):
        try:
            return judge(folder, checkpoint, options.trust_remote_code, run.progress)
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
