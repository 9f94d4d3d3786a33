"""The report: what happened to every source tensor, and what it cost. `fates.py` has the tensors, `report_page.py` the files for people."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from typing import Any

from llmcomp.graph.model import ModelGraph, unused_tensors
from llmcomp.graph.stored import stored_methods
from llmcomp.options import ExportOptions
from llmcomp.planning import COMPRESSION_FIELDS, FLOATS, Plan, runs_packed
from llmcomp.writing.fates import fallbacks, requests, tensor_fates
from llmcomp.writing.layout import Slot
from llmcomp.writing.report_page import markdown, page
from llmcomp.writing.stream import Outcome

SCHEMA = 1
REPORTED_VERSIONS = ("llmcomp", "openvino", "openvino-tokenizers", "optimum", "optimum-intel", "transformers", "torch")


@dataclass(frozen=True)
class Compressed:
    """What compression has left behind beside the .bin."""

    outcomes: Mapping[str, Outcome]
    tail: Mapping[str, Slot]
    folds: Sequence[Mapping[str, Any]]
    """A line on each fold."""
    calibrated: Mapping[str, Mapping[str, Any]]
    """Layer name -> what calibration did to it."""
    permuted: Sequence[Mapping[str, Any]] = ()
    """A line on each inner dimension whose channels were sorted."""


@dataclass(frozen=True)
class Submodel:
    """A written .xml and .bin: what they were made of, and how."""

    graph: ModelGraph
    plan: Plan
    done: Compressed
    verified: str
    bin_bytes: int

    def told(self) -> dict[str, Any]:
        """A line of the report."""
        return {
            "name": self.graph.skeleton.name,
            "layers": len(self.plan.layers),
            "weights": self.plan.summary.weights,
            "bytes": {"bin": self.bin_bytes, "weights": self.plan.summary.bytes},
            "bits_per_weight": self.plan.summary.bits_per_weight,
            "formats": self.plan.counts(),
            "verified": self.verified,
        }


def make_report(
    submodels: Sequence[Submodel],
    plan: Plan,
    settings: Mapping[str, Any],
    versions: Mapping[str, str],
    seconds: Mapping[str, float],
    warnings: list[str],
    data: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The report as plain data (JSON-able). `data` is what was looked at, if anything was."""
    graph = submodels[0].graph
    layers = [line for one in submodels for line in _layers(one)]
    weights, stored = sum(one.plan.summary.weights for one in submodels), sum(one.plan.summary.bytes for one in submodels)
    made_of = {tensor for one in submodels for source in one.graph.sources.values() for tensor in source.tensors}
    tails = [slot for one in submodels for slot in one.done.tail.values()]
    checks = {one.verified: None for one in submodels}
    # Of one graph the plan as it was followed, without what calibration could not reach; nothing calibrates several.
    followed = submodels[0].plan if len(submodels) == 1 else plan
    outcomes = {name: outcome for one in submodels for name, outcome in one.done.outcomes.items()}
    wide = [entry.name for entry in followed.layers if entry.format not in FLOATS and outcomes[entry.name].scale_type == "f32"]
    return {
        "schema": SCHEMA,
        "source": graph.checkpoint.source,
        "stored": stored_methods([one.graph for one in submodels]),
        "model_type": graph.skeleton.model_type,
        "task": graph.skeleton.task,
        "submodels": [one.told() for one in submodels],
        "settings": dict(settings),
        "versions": dict(versions),
        "weights": weights,
        "bytes": {
            "bin": sum(one.bin_bytes for one in submodels),
            "weights": stored,
            "f32_scales": sum(slot.part.nbytes for slot in tails if slot.part.element_type == "f32"),
        },
        "bits_per_weight": round(8 * stored / weights, 4) if weights else 0.0,
        "formats": _by_format(layers),
        "requests": requests([layer for one in submodels for layer in one.graph.layers], followed),
        "share": None if followed.share is None else {**followed.share.model_dump(), "value": round(followed.share.value, 6)},
        "data": data,
        "summary": followed.summary.model_dump(),
        "layers": layers,
        "folds": [dict(line) for one in submodels for line in one.done.folds],
        "permuted": [dict(line) for one in submodels for line in one.done.permuted],
        "fallbacks": fallbacks(followed, {name: told for one in submodels for name, told in one.done.calibrated.items()}, wide),
        "tensors": tensor_fates([one.graph for one in submodels], followed),
        "float_tensors": sorted(set(graph.skeleton.real) - made_of),
        "unused_tensors": unused_tensors([one.graph for one in submodels]),
        "fallback": graph.skeleton.fallback,
        "verified": "; ".join(checks),
        "seconds": {k: round(v, 3) for k, v in seconds.items()},
        "warnings": warnings,
    }


def _layers(one: Submodel) -> list[dict[str, Any]]:
    """A line for each layer."""
    graph, done = one.graph, one.done
    layers, by_name = [], {layer.name: layer for layer in graph.layers}
    for entry in one.plan.layers:
        outcome = done.outcomes[entry.name]
        layers.append(
            {
                "name": entry.name,
                "submodel": graph.skeleton.name,
                "tensor": entry.tensor,
                "tensors": [*graph.sources[entry.name].tensors] or None,
                "shape": list(entry.shape),
                "format": entry.format,
                "table": outcome.format if outcome.format != entry.format else None,
                "group_size": entry.group_size,
                "rule": entry.rule,
                "rounding": entry.rounding,
                "adapters": {"rank": entry.adapter_rank, "format": entry.adapter_format} if entry.adapter_rank else None,
                "bytes": entry.bytes,
                "scale_type": outcome.scale_type if entry.format != "keep" else None,
                "relative_error": round(outcome.error, 8),
                "plain_error": round(outcome.plain_error, 8) if entry.format not in FLOATS else None,
                "seconds": round(outcome.seconds, 4),
                "runs_packed": runs_packed(by_name[entry.name], entry.scheme),
                "reason": entry.reason,
                "calibration": dict(done.calibrated[entry.name]) if entry.name in done.calibrated else None,
            }
        )
    return layers


def _by_format(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    counts: Counter[tuple[str, int]] = Counter()
    sizes: Counter[tuple[str, int]] = Counter()
    stored: Counter[tuple[str, int]] = Counter()
    packed: dict[tuple[str, int], bool] = {}
    for layer in layers:
        key = (layer["format"], layer["group_size"])
        counts[key] += 1
        sizes[key] += prod(layer["shape"])
        stored[key] += layer["bytes"]
        packed[key] = packed.get(key, True) and layer["runs_packed"]
    return [
        {
            "format": f,
            "group_size": g,
            "layers": counts[f, g],
            "weights": sizes[f, g],
            "bytes": stored[f, g],
            "bits_per_weight": round(8 * stored[f, g] / sizes[f, g], 4),
            "runs_packed": packed[f, g],
        }
        for f, g in sorted(counts)
    ]


def write_report(report: Mapping[str, Any], folder: Path) -> None:
    """report.json, report.md and report.html."""
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf8")
    (folder / "report.md").write_text(markdown(report), encoding="utf8")
    (folder / "report.html").write_text(page(report), encoding="utf8")


def rt_info(options: ExportOptions, plan: Plan) -> dict[str, Any]:
    """What the IR says about its origin."""
    settings = options.model_dump(mode="json", include=COMPRESSION_FIELDS)
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
