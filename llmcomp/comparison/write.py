"""compare.json, compare.md and compare.html of a record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmcomp.comparison import plots
from llmcomp.comparison.columns import used
from llmcomp.errors import OutputError
from llmcomp.pages.render import render

HERE = Path(__file__).parent
JSON, MARKDOWN, PAGE = "compare.json", "compare.md", "compare.html"
WORST = 5
"""Layers of the largest error that the page names, for each model."""


def check_output(folder: Path, overwrite: bool) -> None:
    """The files can be written into the folder, which is made if its parent is there.

    Raises:
        OutputError: no place for it, or one of the files exists and `overwrite` is not set.
    """
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"--output {folder}", "it is not a folder", "Choose another")
    if not folder.absolute().parent.is_dir():
        raise OutputError(f"--output {folder}", f"there is no folder {folder.absolute().parent}", "Make it first")
    found = [name for name in (JSON, MARKDOWN, PAGE) if (folder / name).exists()]
    if found and not overwrite:
        raise OutputError(f"--output {folder}", f"{', '.join(found)} exists there", "Choose another folder, or give --overwrite")


def write_comparison(record: Mapping[str, Any], folder: Path) -> None:
    """Write the three files into the folder."""
    folder.mkdir(exist_ok=True)
    (folder / JSON).write_text(json.dumps(record, indent=1, allow_nan=False, ensure_ascii=False) + "\n", encoding="utf8")
    for name, text in ((MARKDOWN, markdown(record)), (PAGE, page(record))):
        (folder / name).write_text(text, encoding="utf8")


def markdown(record: Mapping[str, Any]) -> str:
    return _render("compare.md.j2", record)


def page(record: Mapping[str, Any]) -> str:
    """The HTML page, complete in itself: nothing is loaded from elsewhere, and no script runs."""
    models = [model for model in record["models"] if not model["reference"]]
    loss = "kl" if models[0]["kl"] is not None else "perplexity"
    layered = [model for model in models if model["layers"]]
    worst = {m["number"]: sorted(m["layers"], key=lambda layer: -layer["relative_error"])[:WORST] for m in layered}
    drawn = [model for model in models if model[loss] is not None]
    return _render(
        "compare.html.j2",
        record,
        loss=loss,
        layered=layered,
        worst=worst,
        size_plot=plots.size_against_loss(drawn, loss) if drawn else None,
        layer_plot=plots.layer_errors(layered) if layered else None,
    )


def _render(template: str, record: Mapping[str, Any], **more: Any) -> str:
    return render(HERE / template, r=record, columns=used(record["models"]), **more)
