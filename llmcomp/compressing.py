"""Compressing, the stage that follows a plan: folds and tables chosen, weights rounded, the model written.

comes in: a graph, a plan, data where the plan asks for calibration
goes out: the .xml and .bin of a model or submodel, with what became of each layer
may import: every stage before it
read first: write_model
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from llmcomp import formats, kernels, planning
from llmcomp.algorithms.search import search
from llmcomp.calibrating import LEAST_TOKENS, calibrate, inner_folds, input_power
from llmcomp.calibration import Samples
from llmcomp.errors import PrecisionError
from llmcomp.fitting import fit_tables
from llmcomp.folding import choose_folds, fold
from llmcomp.graph.factors import Factors
from llmcomp.graph.folds import Fold
from llmcomp.graph.layer import Layer
from llmcomp.graph.model import ModelGraph
from llmcomp.graph.sections import Sections, divide, take_orders
from llmcomp.permuting import choose_inner, permute
from llmcomp.planning import Plan, Scheme
from llmcomp.preparing import Data
from llmcomp.running import Run
from llmcomp.threads import workers
from llmcomp.writing.bundle import check_disk
from llmcomp.writing.ir import write_ir
from llmcomp.writing.journal import Journal
from llmcomp.writing.layout import Layout, make_layout
from llmcomp.writing.report import Compressed, rt_info
from llmcomp.writing.resume import Unfinished
from llmcomp.writing.stream import BinWriter, Outcome, Quantizer

RULES: dict[str, str | kernels.Ranges] = {planning.SEARCH: search}
"""Rules that are algorithms; the others are the formats' own."""
LOST = 0.9
"""Relative squared error from which on nothing of a layer is left: no scale is below 2^-23, and a table may lack what the weights are."""
FADED = 0.01
"""Relative squared error in groups of the least scale from which on too little is left: 4 bits lose as much in all groups, 8 bits a hundredth."""


@dataclass(frozen=True)
class Written:
    """A model in the folder, and the plan without what calibration could not reach."""

    plan: Plan
    layout: Layout
    done: Compressed
    factors: Factors
    """What folds have done to the weights before they were rounded."""


def write_model(graph: ModelGraph, plan: Plan, data: Data, folder: Path, run: Run) -> Written:
    """Compress by this plan, in place of what an earlier one has left in the folder."""
    options = data.options
    sections, plan = divided(graph, plan, run)
    schemes, folds = plan.schemes, choose_folds(graph, plan)
    folds = folds if sections is None else inner_folds(folds, sections)
    layout = make_layout(graph, schemes, folds)
    name = graph.skeleton.name
    unfinished = Unfinished(folder, name)
    finished = unfinished.take_up(_work(plan, layout), _matrices(graph, schemes), layout, _reached(graph, schemes, sections, unfinished))
    written = unfinished.bin
    check_disk(options.output or folder, layout.size - (written.stat().st_size if written.exists() else 0))
    data.finish_tokenizer()
    samples = data.get() if sections is not None else None
    data.check_used()
    permuted: Sequence[Mapping[str, Any]] = ()
    if inner := choose_inner(graph, plan):
        with run.stage("permute"):
            graph, permuted = permute(graph, inner, workers())
            if sections is not None:
                take_orders(sections, graph)
    done, factors = _compress(graph, plan, layout, folds, sections, samples, unfinished, finished, run)
    done = replace(done, permuted=permuted)
    with run.stage("write"):
        write_ir(graph, schemes, layout, done.tail, folder / f"{name}.xml", rt_info(options, plan))
    return Written(plan, layout, done, factors)


def divided(graph: ModelGraph, plan: Plan, run: Run) -> tuple[Sections | None, Plan]:
    """The sections that calibration runs, and the plan without what it cannot reach; None if the plan asks for no calibration."""
    if not plan.is_calibrated:
        return None, plan
    with run.stage("divide"):
        schemes = plan.schemes
        sections = divide(
            graph, lambda layer: schemes[layer.name].is_calibrated or planning.is_low(schemes[layer.name].format), experts=True
        )
        reached = {name for section in sections.parts for site in section.sites for name in site}
        stacks = [layer.name for section in sections.parts if section.mixture for layer in section.mixture.stacks]
        reached |= {name for name in stacks if schemes[name].format != formats.ADAPTIVE}
        plan, missed = plan.without_calibration(reached)
    if sections.undivided:
        run.warn(f"calibrated in one pass over the whole model, in memory: {sections.undivided}")
    if missed:
        run.warn(f"{len(missed)} layers are not calibrated, {missed[0]} for one: what they read is not seen block by block")
    return sections, plan


def _compress(
    graph: ModelGraph,
    plan: Plan,
    layout: Layout,
    folds: tuple[Fold, ...],
    sections: Sections | None,
    samples: Samples | None,
    unfinished: Unfinished,
    finished: Mapping[str, Mapping[str, Any]],
    run: Run,
) -> tuple[Compressed, Factors]:
    schemes, folder = plan.schemes, unfinished.folder
    matrices = {layer.name: (layer, scheme) for layer, scheme in planning.stored(graph.layers, schemes)}

    def tell(layer: Layer, outcome: Outcome) -> None:
        _, scheme = matrices[layer.name]
        run.progress.layer(layer.name, scheme.format, outcome.seconds, group_size=scheme.group_size, error=outcome.error)
        # What data has chosen need not be near the weight itself.
        if (outcome.error > LOST or outcome.lost > FADED) and not scheme.is_calibrated:
            raise _lost(layer.name, scheme.format, outcome.error)

    path, calibrated = unfinished.bin, None
    run.progress.start(sum(layer.size for layer, _ in matrices.values()), "weights")
    if finished:
        run.progress.note(f"{len(finished)} of {len(matrices)} matrices are finished already")
    try:
        with (
            Journal(unfinished.journal) as journal,
            BinWriter(graph, schemes, layout, path, kernels.non_finite, journal, workers(), tell, run.progress.advance, finished) as writer,
        ):
            if sections is None or samples is None:
                with run.stage("fold"):
                    factors, folded = fold(graph, plan, folds, workers())
            else:
                with run.stage("calibrate"), TemporaryDirectory(prefix=".calibration-", dir=folder) as scratch:
                    seen = _share_tables(graph, plan, folds, sections, samples, writer, Path(scratch))
                    hand_on = writer.put, writer.check_finite
                    calibrated = calibrate(graph, seen, folds, sections, samples.rows, *hand_on, Path(scratch), unfinished)
                    factors, folded = calibrated.factors, calibrated.folds
                for name, told in calibrated.layers.items():
                    # Without the correction beside it, which would have to stand for the layer alone.
                    loss = told.get("rounded_loss", told["loss"])
                    if not loss <= LOST or loss * told.get("faded", 0.0) > FADED:
                        raise _lost(name, schemes[name].format, loss)
                few = {name: told["few_tokens"] for name, told in calibrated.layers.items() if told.get("few_tokens")}
                if few:
                    name, numbers = next(iter(few.items()))
                    count = sum(map(len, few.values()))
                    run.warn(
                        f"{count} experts saw fewer than {LEAST_TOKENS} tokens, number {numbers[0]} of {name} for one: they are compressed for "
                        "tokens of all kinds; more samples would reach them"
                    )
                if calibrated.unmoved:
                    first = calibrated.unmoved[0]
                    run.warn(
                        f"{len(calibrated.unmoved)} layers read nothing but zeros, or what is zero when squared, {first} for one: the data says nothing of them"
                    )
            with run.stage("compress"):
                rest = [layer for layer in graph.layers if layer.name not in writer.outcomes]
                # Of all that is left by data, also what an earlier run has finished: layers may share a table.
                left = [layer for layer in graph.layers if calibrated is None or layer.name not in calibrated.layers]
                tables = fit_tables(graph, schemes, left, factors, plan.tables == "blocks", workers=workers()) if rest else {}
                writer.stream(rest, quantizer(factors), factors, tables)
                tail = writer.finish(factors)
            _tell_faded(writer.outcomes, calibrated.layers if calibrated else {}, run)
            return Compressed(writer.outcomes, tail, folded, calibrated.layers if calibrated else {}), factors
    finally:
        kernels.clear_cache()


def _tell_faded(outcomes: Mapping[str, Outcome], calibrated: Mapping[str, Mapping[str, Any]], run: Run) -> None:
    """Warn of groups that have nearly or wholly become zeros in layers that are otherwise as they should be."""
    groups = {name: outcome.faded or calibrated.get(name, {}).get("faded_groups", 0) for name, outcome in outcomes.items()}
    found = {name: count for name, count in groups.items() if count}
    if found:
        name, count = next(iter(found.items()))
        run.warn(
            f"{len(found)} layers have groups below the least step of a scale, {name} {count} for one: they are zeros now, or nearly; if they "
            f"matter, --override '{name}=keep'"
        )


def _lost(layer: str, name: str, error: float) -> PrecisionError:
    return PrecisionError(
        layer,
        f"{name} keeps {'too little' if error <= LOST else 'nothing'} of it (relative squared error {error:.2g}): its weights are below the "
        "least step, or no match for the table",
        f"Use --override '{layer}=keep', or another format",
    )


def _work(plan: Plan, layout: Layout) -> str:
    """What must be equal for finished layers to be of use."""
    return plan.model_copy(update={"notes": (), "budget": None}).to_json() + str(layout.size)


def _matrices(graph: ModelGraph, schemes: Mapping[str, Scheme]) -> list[Layer]:
    return [layer for layer, _ in planning.stored(graph.layers, schemes)]


def _reached(graph: ModelGraph, schemes: Mapping[str, Scheme], sections: Sections | None, unfinished: Unfinished) -> Callable[[str], bool]:
    """Whether a layer that is finished counts: one that calibration compresses only if its section is behind the state that is gone on from."""
    if sections is None:
        return lambda _: True
    last = unfinished.reached()
    layers = [x for section in sections.parts[last + 2 :] for x in (*section.layers, *(section.mixture.stacks if section.mixture else ()))]
    ahead = {layer.name for layer in layers if schemes[layer.name].is_calibrated}
    return lambda name: name.removesuffix("/lora_A").removesuffix("/lora_B") not in ahead


def _share_tables(
    graph: ModelGraph, plan: Plan, folds: tuple[Fold, ...], sections: Sections, samples: Samples, writer: BinWriter, scratch: Path
) -> Plan:
    """The plan with a codebook for the calibrated layers that share one across blocks: those must all be seen before the first is rounded."""
    wanted = {entry.name for entry in plan.layers if entry.format == formats.ADAPTIVE and entry.scheme.is_calibrated}
    if plan.tables != "blocks" or not wanted:
        return plan
    moments = input_power(graph, plan, sections, samples.rows, writer.check_finite, scratch)
    # Factors by data are chosen later, block by block; these make the columns nearly as alike.
    factors, _ = fold(graph, plan, folds, workers())
    layers = [layer for layer in graph.layers if layer.name in wanted]
    tables = fit_tables(graph, plan.schemes, layers, factors, True, moments, workers())
    entries = tuple(entry.model_copy(update={"format": tables.get(entry.name, entry.format)}) for entry in plan.layers)
    return plan.model_copy(update={"layers": entries})


def quantizer(factors: Factors) -> Quantizer:
    """The kernel for one tile of a layer under its scheme."""

    def quantize(layer: Layer, scheme: Scheme, w: Any, start: int) -> kernels.Tile:
        rows = factors.rows.get(layer.name)
        given = kernels.Given(factors.columns.get(layer.name), None if rows is None else rows[start : start + len(w)])
        return kernels.quantize_rows(formats.get(scheme.format), w, scheme.group_size, RULES.get(scheme.rule, scheme.rule), given)

    return quantize
