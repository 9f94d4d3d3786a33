"""The schemes whose loss `llmcomp measure` tells for each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llmcomp import formats
from llmcomp.errors import OptionError
from llmcomp.graph.layer import Layer
from llmcomp.options import ExportOptions
from llmcomp.planning.check import group_of, is_low, resolve
from llmcomp.planning.devices import ragged
from llmcomp.planning.measured import Measured, MeasuredLayer, candidate, parse_candidate
from llmcomp.planning.scheme import FLOATS, SCALE_ESTIMATION, Scheme

LADDER = ("int4_sym:32", "int4_sym:64", "int4_sym:128", "int4_asym:32", "int4_asym:64", "int8_asym:-1")
"""What the CPU plugin computes with packed weights, tables included, in steps of size."""


def candidates(options: ExportOptions) -> tuple[Scheme, ...]:
    """The asked candidates, or the weight format with its group followed by the ladder. The first is the base: it is tried for real.

    Raises:
        OptionError: one is no FORMAT:GROUP, or no weight format to measure.
    """
    asked = options.candidates
    if not asked:
        main = resolve(options.weight_format, options.sym)
        if main in FLOATS:
            raise OptionError(
                f"--weight-format {options.weight_format}", "it loses nothing that could be measured", "Name a format of few bits"
            )
        asked = (candidate(main, group_of(options, main)), *LADDER)
    found = dict.fromkeys(parse_candidate(text, f"candidate '{text}'") for text in asked)
    return tuple(Scheme(name, group, SCALE_ESTIMATION if is_low(name) else formats.get(name).best_rule) for name, group in found)


def ranked_by_loss(options: ExportOptions) -> tuple[Scheme, ...]:
    """What a ratio decides between: the weight format, in the groups that layers may get, and the backup."""
    main = resolve(options.weight_format, options.sym)
    group = group_of(options, main)
    groups = [group, *(size for size in (256, 128, 64, 32) if size < group and not formats.get(main).fixed_group)]
    backup = [] if options.backup_precision == "none" else [candidate(options.backup_precision, -1)]
    return candidates(options.model_copy(update={"candidates": (*(candidate(main, size) for size in groups), *backup)}))


def fitting(layer: Layer, schemes: Sequence[Scheme]) -> tuple[Scheme, ...]:
    """Those that a layer's readers, channel size and device allow. What a table's rows are multiplied by is not asked: its scales are plain."""
    fit = [x for x in schemes if _fits(layer, x)]
    return tuple(replace(x, rule=formats.get(x.format).best_rule) for x in fit) if "Gather" in layer.ops else tuple(fit)


def _fits(layer: Layer, scheme: Scheme) -> bool:
    if "Gather" in layer.ops and not formats.get(scheme.format).for_embeddings:
        return False
    return (scheme.group_size == -1 or layer.shape[-1] % scheme.group_size == 0) and not ragged(layer, scheme)


def not_measured(layers: Sequence[Layer], schemes: Sequence[Scheme]) -> Measured:
    """The file before anything is known: each layer with all that could be told of it, and no loss."""
    lines = []
    for layer in layers:
        nats = {candidate(x.format, x.group_size): 0.0 for x in fitting(layer, schemes)}
        lines.append(MeasuredLayer(name=layer.name, tensor=layer.tensor, shape=layer.shape, nats=nats))
    return Measured(data="", tokens=0, layers=tuple(lines))
