"""The report for people: report.md, and report.html, one page that loads nothing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmcomp.pages.render import render
from llmcomp.planning import FLOATS
from llmcomp.writing.fates import FATES

HERE = Path(__file__).parent
SHOWN = 3
"""Tensors of one layer, or of one kind, that are named; all of them are in report.json."""


def markdown(report: Mapping[str, Any]) -> str:
    return render(HERE / "report.md.j2", r=report, floats=[*FLOATS], tensors=tensor_rows(report["tensors"]), fates=FATES)


def page(report: Mapping[str, Any]) -> str:
    """The HTML page, complete in itself: nothing is loaded from elsewhere, and no script runs."""
    # It loads matplotlib.
    from llmcomp.writing import report_plots

    layers, calibrated = report["layers"], [x for x in report["layers"] if x["calibration"]]
    return render(
        HERE / "report.html.j2",
        r=report,
        floats=[*FLOATS],
        tensors=tensor_rows(report["tensors"]),
        fates=FATES,
        worst=sorted((x for x in layers if x["format"] not in FLOATS), key=lambda x: -x["relative_error"])[:5],
        plots={
            "errors": report_plots.errors(layers),
            "losses": report_plots.losses(calibrated),
            "bytes": report_plots.bytes_by_format(report["formats"], report["bytes"]["bin"] - report["bytes"]["weights"]),
            "bits": report_plots.bits(layers),
            "seconds": report_plots.seconds(report["seconds"]),
        },
    )


def tensor_rows(tensors: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tensors that share a fate in the same layers, or that stay as they are under names that differ by a number alone, in one row: there may be tens of
    thousands, the experts of a mixture for one."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for one in tensors:
        where = tuple(one["layers"].items()) or re.sub(r"\d+", "*", one["tensor"])
        groups.setdefault((one["fate"], where), []).append(one["tensor"])
    counts = Counter(one["fate"] for one in tensors)
    return [
        {
            "fate": fate,
            "names": names[:SHOWN],
            "more": len(names) - len(names[:SHOWN]),
            "layers": {} if isinstance(where, str) else dict(where),
            "of_fate": counts[fate],
        }
        for (fate, where), names in groups.items()
    ]
