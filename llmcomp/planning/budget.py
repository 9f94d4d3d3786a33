"""What each layer may become under a budget, and what it loses then: from measured losses to candidates, and from a choice to a plan.

A layer has one candidate only where a rule names it, where it is a router, and where nothing was measured: the one that it has without a
budget.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from llmcomp import formats
from llmcomp.graph.layer import Layer
from llmcomp.options import ExportOptions
from llmcomp.planning.assign import Asked, Planner, make_plan
from llmcomp.planning.check import is_low
from llmcomp.planning.devices import ragged
from llmcomp.planning.matching import ignored_layers, overridden_layers
from llmcomp.planning.measured import Measured, candidate, parse_candidate
from llmcomp.planning.plan import LayerPlan, Plan, summarize
from llmcomp.planning.roles import is_router
from llmcomp.planning.scheme import FLOATS, Scheme

PLAIN, EQUALIZED, CALIBRATED, SECOND_ORDER, CORRECTED = 1.4, 0.87, 0.58, 0.39, 0.31
"""What a low-bit layer loses over what it was measured to lose, which is with calibrated scales and nothing else: rounded plainly, with columns
made alike, with --awq or --scale-estimation as well, with --gptq, and with --target-correction. Tables have no part in it: nothing of this helps them.

EQUALIZED and CALIBRATED are KL over the sum of the measured losses of SmolLM2-135M with all inner layers at 4 bits in groups of 64; PLAIN and
SECOND_ORDER follow from these by the relations of published and prototype figures, and were not measured, CORRECTED from SECOND_ORDER by the
relation of KL on that model (evaluation/results/calibrated-smollm2.json). One model: elsewhere they may be off.
"""


@dataclass(frozen=True)
class Ladder:
    """For each layer, in topological order, the lines that it may get in the plan, and the nats per token that it loses with each alone."""

    lines: tuple[tuple[LayerPlan, ...], ...]
    nats: tuple[tuple[float, ...], ...]
    low_folds: Literal["none", "equalize", "awq"]
    """Folds of a plan that has low-bit layers."""
    low_permutation: Literal["none", "sorted"]
    """Its permutation."""
    low_target_correction: bool
    """Whether its layers make up for those before them."""
    unknown: tuple[str, ...]
    """Layers whose loss is not known and counts as 0."""

    def plan(self, choice: Sequence[int]) -> Plan:
        """The plan in which each layer has its chosen line."""
        lines = tuple(options[k] for options, k in zip(self.lines, choice, strict=True))
        weights: Counter[str] = Counter()
        for line in lines:
            weights[line.format] += prod(line.shape)
        main = max(sorted(weights), key=lambda name: weights[name])
        low = any(is_low(line.format) for line in lines)
        return Plan(
            main=main,
            folds=self.low_folds if low else "none",
            permutation=self.low_permutation if low else "none",
            target_correction=self.low_target_correction and any(line.rounding == "gptq" for line in lines),
            layers=lines,
            summary=summarize(lines, main, None, None),
        )


def ladder(layers: Sequence[Layer], options: ExportOptions, measured: Measured) -> Ladder:
    """What these layers may become by what was measured of them.

    Raises:
        OptionError, RuleError, GroupSizeError: as `make_plan`.
    """
    base = make_plan(layers, options)
    ruled = {*ignored_layers(options, layers), *overridden_layers(options, layers)}
    nats = {entry.name: entry.nats for entry in measured.layers}
    low = {name for entry in measured.layers for text in entry.nats if is_low(name := parse_candidate(text, entry.name)[0])}
    planner = Planner(options, low)
    lines, losses, unknown = [], [], []
    for layer, line in zip(layers, base.layers, strict=True):
        known = nats.get(layer.name, {})
        free = layer.name not in ruled and not is_router(layer)
        known = {text: loss * _share(layer, text, options) for text, loss in known.items()}
        own = _fitting(layer, planner, known) if free else []
        if not own:
            own = [(line, known.get(candidate(line.format, line.group_size), 0.0))]
            if line.format not in FLOATS and candidate(line.format, line.group_size) not in known:
                unknown.append(layer.name)
        lines.append(tuple(entry for entry, _ in own))
        losses.append(tuple(loss for _, loss in own))
    kinds = planner.folds(low=True), planner.permutation(low=True), options.target_correction
    return Ladder(tuple(lines), tuple(losses), *kinds, tuple(unknown))


def _share(layer: Layer, text: str, options: ExportOptions) -> float:
    """What is left of a measured loss by what else is asked for."""
    if "Gather" in layer.ops or not is_low(parse_candidate(text, layer.name)[0]):
        return 1.0
    if options.gptq:
        return CORRECTED if options.target_correction else SECOND_ORDER
    if options.awq or options.scale_estimation:
        return CALIBRATED
    return PLAIN if options.folds == "none" else EQUALIZED


def _fitting(layer: Layer, planner: Planner, known: dict[str, float]) -> list[tuple[LayerPlan, float]]:
    """The measured candidates that the layer's readers and device take, with their losses."""
    found = []
    for text, loss in known.items():
        name, group = parse_candidate(text, layer.name)
        looked_up = "Gather" not in layer.ops or formats.get(name).for_embeddings
        if looked_up and not ragged(layer, Scheme(name, group)):
            found.append((planner.entry(layer, Asked(name, group, "by the budget", in_ratio=True)), loss))
    return found
