"""The record of a comparison: plain data, from which table, JSON and page are all made."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from llmcomp import __version__
from llmcomp.inspect import Inspection
from llmcomp.judge import PROPERTIES, Comparison, Judged, Text

SCHEMA = 1


def make_record(comparison: Comparison, inspections: Mapping[str, Inspection], text: Text, command: str) -> dict[str, Any]:
    """The record (JSON-able) of what the judge found.

    `inspections` are of the compared folders, by the name that the judge was given; a reference that is no IR has none.
    """
    settings = comparison.settings
    everyone = [*([comparison.reference] if comparison.reference else []), *comparison.models]
    names = [judged.scores.name for judged in everyone]
    rows: list[dict[str, Any]] = []
    for judged, label in zip(everyone, short_names(names), strict=True):
        is_reference = judged is comparison.reference
        number = "ref" if is_reference else str(len(rows) + (comparison.reference is None))
        rows.append({"number": number, "label": label, "reference": is_reference, **_row(judged, inspections.get(judged.scores.name))})
    first = comparison.models[0]
    return {
        "schema": SCHEMA,
        "command": command,
        "text": {
            "name": text.name,
            "sha256": hashlib.sha256(text.content.encode("utf8", "surrogatepass")).hexdigest(),
            "windows": first.scores.windows,
            "window": first.scores.window,
            "tokens": first.scores.windows * first.scores.window,
            "scored_tokens": first.scores.tokens,
            "tokenizer": comparison.tokenizer,
        },
        "answers": {"prompts": len(settings.prompts), "tokens": settings.answer_tokens} if first.agreement else None,
        "speed": {
            "prompt_tokens": settings.prompt_tokens,
            "tokens": settings.speed_tokens,
            "repeats": settings.repeats,
            "device": comparison.device,
            "logical_cpus": os.cpu_count(),
        }
        if first.speed
        else None,
        "accuracy_properties": PROPERTIES,
        "versions": {"llmcomp": __version__, **{name: version(name) for name in ("openvino", "numpy")}},
        "models": rows,
    }


def _row(judged: Judged, inspection: Inspection | None) -> dict[str, Any]:
    scores, speed, agreed = judged.scores, judged.speed, judged.agreement
    return {
        "name": scores.name,
        "made_by": inspection.made_by if inspection else None,
        "bin_bytes": scores.bin_bytes,
        "bits_per_weight": inspection.bits_per_weight if inspection else None,
        "perplexity": _finite(scores.perplexity),
        "perplexity_standard_error": scores.perplexity_standard_error,
        "kl": scores.kl,
        "kl_standard_error": scores.kl_standard_error,
        "kl_difference": judged.kl_difference,
        "kl_difference_standard_error": judged.kl_difference_standard_error,
        "kl_percentiles": scores.kl_percentiles,
        "window_kl": list(scores.window_kl),
        "top1": scores.top1,
        "first_token_ms": speed.first_token_ms if speed else None,
        "later_token_ms": speed.later_token_ms if speed else None,
        "fdt": agreed.first_divergent if agreed else None,
        "fdt_norm": agreed.first_divergent_share if agreed else None,
        "identical_answers": agreed.identical if agreed else None,
        "layers": _layers(inspection.report) if inspection and inspection.report else None,
    }


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def _layers(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Name, format and relative squared error of the layers that were rounded, in the report's order, which is the model's."""
    keys = ("name", "format", "relative_error")
    return [{key: layer[key] for key in keys} for layer in report["layers"] if layer["relative_error"] > 0]


def short_names(names: Sequence[str]) -> list[str]:
    """The last part of each path, with as many before it as tell the names apart; a hub id stays whole."""
    parts = [Path(os.path.abspath(name)).parts if Path(name).exists() else (name,) for name in names]
    longest = max(len(p) for p in parts)
    for depth in range(1, longest + 1):
        short = ["/".join(p[-depth:]) for p in parts]
        if len(set(short)) == len(set(names)):
            return short
    return list(names)
