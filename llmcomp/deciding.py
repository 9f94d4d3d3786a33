"""Deciding, the stage that makes the plan: from options, from a file, by a ratio's scores or on the way to a budget.

comes in: graphs, options, data where it has a say
goes out: a Plan, a Budgeting, Measured
may import: algorithms, budgeting, calibration, errors, folding, graph, kernels, measuring, options, planning, preparing, running, writing
read first: decide
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from llmcomp import kernels, planning
from llmcomp.algorithms import sensitivity
from llmcomp.budgeting import Budgeting
from llmcomp.calibration import Samples
from llmcomp.errors import OptionError
from llmcomp.folding import choose_folds
from llmcomp.graph.layer import Layer
from llmcomp.graph.model import ModelGraph, flat_rows
from llmcomp.graph.stored import stored_layers
from llmcomp.measuring import measure
from llmcomp.options import ExportOptions
from llmcomp.planning import Measured, Plan, Scheme
from llmcomp.preparing import Data, Graphs
from llmcomp.running import Run
from llmcomp.writing.finite import non_finite_error
from llmcomp.writing.ir import write_ir
from llmcomp.writing.layout import make_layout
from llmcomp.writing.report import rt_info
from llmcomp.writing.resume import MEASURED
from llmcomp.writing.stream import tile_rows


def decide(graphs: Graphs, options: ExportOptions, data: Data, run: Run) -> Plan:
    """The plan to follow, or the first on the way to a budget."""
    return start_budget(graphs[0], options, data, run).plan if options.budget else plan_by_rules(graphs, options, data, run)


def plan_by_rules(graphs: Graphs, options: ExportOptions, data: Data, run: Run) -> Plan:
    """The plan where no budget is asked for."""
    layers = [layer for graph in graphs for layer in graph.layers]
    measured = _measured(graphs[0], options, data, run)
    with run.stage("plan"):
        if options.plan is not None:
            where = f"plan {options.plan}"
            told = Plan.from_json(_text(options.plan), where)
            plan = told.check_against(layers, where, stored_layers(graphs) if told.keeps_codes else {})
            if plan.is_calibrated and len(graphs) > 1:
                raise OptionError(where, "it asks for calibration, and nothing calibrates several submodels", "Make it anew without")
            return plan
        scores = None
        if measured is not None:
            scores = measured.scores(options.sensitivity_metric)
        elif planning.needs_scores(options):
            scores = {name: score for graph in graphs for name, score in _scores(graph, options).items()}
        stored = stored_layers(graphs) if options.weight_format == planning.KEEP else {}
        plan = planning.make_plan(layers, options, scores, measured, stored)
    _tell(layers, plan, run)
    return plan


def start_budget(graph: ModelGraph, options: ExportOptions, data: Data, run: Run) -> Budgeting:
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
    _tell(graph.layers, budgeting.plan, run)
    return budgeting


def _measured(graph: ModelGraph, options: ExportOptions, data: Data, run: Run) -> Measured | None:
    """What the plan must know about layers, from the file or measured now; None if that takes no data."""
    if options.sensitivity is not None:
        where = f"sensitivity file {options.sensitivity}"
        return Measured.from_json(_text(options.sensitivity), where).check_against(graph.layers, graph.checkpoint.values_digest(), where)
    if not planning.needs_data(options):
        return None
    kept = data.unfinished.text(MEASURED) if data.unfinished else None
    if kept is not None:
        run.use(data.get())
        return Measured.from_json(kept, "what was measured before")
    by_loss = planning.ranked_by_loss(options) if options.sensitivity_metric == planning.PREDICTED else ()
    measured = measure_layers(graph, options, run, data.get(), planning.candidates(options) if options.budget else by_loss)
    if data.unfinished:
        data.unfinished.keep_text(MEASURED, measured.to_json())
    return measured


def measure_layers(graph: ModelGraph, options: ExportOptions, run: Run, samples: Samples, schemes: Sequence[Scheme]) -> Measured:
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


def _tell(layers: Sequence[Layer], plan: Plan, run: Run) -> None:
    for note in plan.notes:
        run.progress.note(note)
    by_name = {layer.name: layer for layer in layers}
    stored_only = sorted({entry.format for entry in plan.layers if not planning.runs_packed(by_name[entry.name], entry.scheme)})
    if stored_only:
        run.progress.note(f"{', '.join(stored_only)}: stored only on this device, the CPU decompresses it to f32 when it loads the model")


def _xml_bytes(graph: ModelGraph, options: ExportOptions, plan: Plan) -> int:
    """Size of the .xml that this plan gives, but for scales that may turn out to need f32."""
    schemes = plan.schemes
    layout = make_layout(graph, schemes, choose_folds(graph, plan))
    with TemporaryDirectory(prefix="llmcomp-xml-") as folder:
        xml = Path(folder) / "openvino_model.xml"
        write_ir(graph, schemes, layout, {}, xml, rt_info(options, plan))
        return xml.stat().st_size


def _scores(graph: ModelGraph, options: ExportOptions) -> dict[str, float]:
    """Data-free sensitivity, streamed, of the layers that a ratio is about."""
    ranked = [layer for layer in graph.layers if options.all_layers or not (layer.last or "Gather" in layer.ops)]
    return {layer.name: sensitivity.weight_quantization_error(sensitivity.int8_error(_tiles(graph, layer))) for layer in ranked}


def _tiles(graph: ModelGraph, layer: Layer) -> Iterator[Any]:
    rows, step = flat_rows(layer), tile_rows(layer.shape[-1])
    return (graph.rows(layer, start, min(start + step, rows)) for start in range(0, rows, step))


def check_files(options: ExportOptions) -> None:
    """What can be refused of a plan and a sensitivity file without the model.

    Raises:
        OptionError: not JSON, or not such a file.
    """
    if options.plan is not None:
        Plan.from_json(_text(options.plan), f"plan {options.plan}")
    if options.sensitivity is not None:
        Measured.from_json(_text(options.sensitivity), f"sensitivity file {options.sensitivity}")


def _text(path: Path) -> str:
    return path.read_bytes().decode("utf8", "replace")
