"""Forecasting, what an export will need beside its output, and whether this machine has it.

comes in: a graph, a plan, the tokens that calibration will see
goes out: bytes of memory and of disk, seconds; warnings in words
may import: calibration, graph, planning, writing
read first: calibration_needs
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np
import psutil

from llmcomp.calibration.runner import BATCH_TOKENS, MAPPED_FROM
from llmcomp.graph.layer import Layer
from llmcomp.graph.sections import Section, Sections
from llmcomp.planning import Plan
from llmcomp.writing.bundle import SPARE, free_disk
from llmcomp.writing.forecast import BASE_BYTES, Forecast

F32 = 4
BLOCK_COPIES = 2
"""The float weights of a block, and the runtime's own order of them."""
SITE_COPIES = 5
"""Float images of the weights of a site while it is compressed: with factors, as a target, two results, a difference."""
MOMENT_COPIES = 3
"""The second moments of a site, their factor, and what that is computed in."""
BATCH_COPIES = 4
"""Values of the widest site's size that a batch of tokens has at a time."""
STREAMS = 2
"""Of all tokens: values before and behind the part of a block that is run."""
RATE_SIZE = 1024
"""Rows and columns of the matrices by which this machine's speed is measured."""


@dataclass(frozen=True)
class Needs:
    """What calibration takes where the same layers rounded plainly take next to nothing."""

    memory_bytes: int
    """At the peak, of the whole process."""
    disk_bytes: int
    """Values of all tokens in files, and what another run could go on with; gone when the export is finished."""
    operations: float
    """Floating-point operations of pushing the data through the blocks and summing up second moments."""


def calibration_needs(sections: Sections, plan: Plan, tokens: int) -> Needs:
    """`tokens` is how many the data has, at most. Every count is of float32 arrays whose sizes follow from the shapes."""
    in_turn = any(entry.rounding == "gptq" for entry in plan.layers)
    asked = {entry.name for entry in plan.layers if entry.scheme.is_calibrated}
    parts = sections.parts[1:]
    widest = max((shape[-1] for part in parts for shape in (x.shape for x in _layers(part))), default=0)
    hidden = sections.embedding.shape[-1] if sections.embedding is not None else widest
    # Hidden states are kept once for each model that the data goes through, values inside a block while its sites are compressed in turn.
    models = 1 + plan.target_correction
    kept = [F32 * tokens * hidden * models] + ([F32 * tokens * widest * STREAMS] if in_turn else [])
    in_files = sum(size for size in kept if size >= MAPPED_FROM)
    peak = max((_memory(part, asked, in_turn, plan.folds == "awq") for part in parts), default=0)
    batch = F32 * BATCH_COPIES * min(tokens, BATCH_TOKENS) * widest
    # A new state is written before the old one goes.
    states = 2 * F32 * tokens * hidden * models
    return Needs(
        BASE_BYTES + peak + batch + sum(kept) - in_files, in_files + states, sum(_operations(part, tokens * models) for part in parts)
    )


def with_calibration(plain: Forecast, needs: Needs) -> Forecast:
    """The forecast of rounding plainly, and what calibration adds to it."""
    return replace(
        plain,
        memory_bytes=max(plain.memory_bytes, needs.memory_bytes),
        more_disk_bytes=needs.disk_bytes,
        calibrate_seconds=needs.operations / operations_per_second(),
    )


def operations_per_second() -> float:
    """Of float32 matrix products on this machine, now."""
    a = np.ones((RATE_SIZE, RATE_SIZE), np.float32)
    a @ a
    started = time.perf_counter()
    a @ a
    return 2 * RATE_SIZE**3 / (time.perf_counter() - started)


def shortages(forecast: Forecast, output: Path, work: str = "export") -> list[str]:
    """What this machine lacks for the work that `forecast` is of, in words."""
    found, needed, free = [], forecast.bin_bytes + forecast.more_disk_bytes + SPARE, free_disk(output)
    if free < needed:
        found.append(
            f"disk: about {_mib(needed)} are needed, and {_mib(free)} are free for {output}: the {work} would be refused, or break off"
        )
    available = psutil.virtual_memory().available
    if available < forecast.memory_bytes:
        found.append(
            f"memory: about {_mib(forecast.memory_bytes)} are needed, and {_mib(available)} are free: the machine would swap, or end the {work}"
        )
    return found


def _memory(section: Section, asked: Collection[str], in_turn: bool, by_data: bool) -> int:
    """Bytes at the peak of a section; with factors chosen `by_data` the second moments of all sites and their factors are there together."""
    by_name = {layer.name: layer for layer in section.layers}
    sites = [[by_name[name] for name in names if name in asked] for names in section.sites]
    sites = [site for site in sites if site]
    moments = [F32 * site[0].shape[-1] ** 2 for site in sites]
    # In turn a site's moments are there with their factors, one site after the other, after those that factors of folds were chosen by.
    one = MOMENT_COPIES * max(moments, default=0) if in_turn else 0
    together = sum(moments) * (1 if not in_turn else 2 if by_data else 0)
    solving = SITE_COPIES * F32 * max((sum(layer.size for layer in site) for site in sites), default=0)
    stacks = section.mixture.stacks if section.mixture else ()
    # Of the experts one is float at a time; the finished ones are a byte for each weight until their stack is written.
    experts = sum(x.size for x in stacks) + SITE_COPIES * F32 * sum(prod(x.shape[-2:]) for x in stacks)
    return BLOCK_COPIES * F32 * sum(layer.size for layer in section.layers) + max(one, together) + max(solving, experts)


def _operations(section: Section, tokens: int) -> float:
    """A product and a sum for each weight and token; for the moments of each site, of which half is computed, for each pair of inputs."""
    by_name: Mapping[str, Layer] = {layer.name: layer for layer in section.layers}
    widths = [by_name[names[0]].shape[-1] for names in section.sites if names]
    experts = sum(prod(x.shape[-2:]) for x in section.mixture.stacks) if section.mixture else 0
    return tokens * (2.0 * (sum(layer.size for layer in section.layers) + experts) + sum(width**2 for width in widths))


def _layers(section: Section) -> tuple[Layer, ...]:
    return (*section.layers, *(section.mixture.stacks if section.mixture else ()))


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"
