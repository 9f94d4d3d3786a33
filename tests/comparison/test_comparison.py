from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmcomp.comparison import COLUMNS, check_output
from llmcomp.comparison.plots import layer_errors, size_against_loss
from llmcomp.comparison.record import short_names
from llmcomp.errors import OutputError
from llmcomp.pages.plots import COLORS


def model(number: str, **figures: Any) -> dict[str, Any]:
    """A model of a record."""
    none = {key: None for column in COLUMNS for key in (column.key, column.error) if key}
    return {"number": number, "label": f"m{number}", "reference": False, "layers": None, **none, **figures}


def test_cells() -> None:
    cells = {
        c.key: c.cell(model("1", bin_bytes=3 << 19, kl=0.12345, kl_standard_error=0.01, kl_difference=-0.25, top1=-1e-9)) for c in COLUMNS
    }
    assert cells["bin_bytes"] == "1.5" and cells["kl"] == "0.1235 ± 0.0100" and cells["kl_difference"] == "-0.2500"
    assert cells["top1"] == "0.0000" and cells["perplexity"] == "-"
    assert next(c for c in COLUMNS if c.key == "kl_difference").cell(model("1", kl_difference=0.5)) == "+0.5000"


def test_short_names(tmp_path: Path) -> None:
    for name in ("a/int4", "b/int4", "b/int8"):
        (tmp_path / name).mkdir(parents=True)
    names = [str(tmp_path / name) for name in ("a/int4", "b/int4", "b/int8")]
    assert short_names(names) == ["a/int4", "b/int4", "b/int8"] and short_names(names[1:]) == ["int4", "int8"]
    assert short_names(["owner/model", names[0], names[0]]) == ["owner/model", "int4", "int4"]


def test_where_the_files_cannot_go(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "compare.md").write_text("")
    for folder, words in (
        (tmp_path / "file", "not a folder"),
        (tmp_path / "no" / "where", "Make it first"),
        (tmp_path, r"compare\.md exists"),
    ):
        with pytest.raises(OutputError, match=words):
            check_output(folder, False)
    check_output(tmp_path, True)
    check_output(tmp_path / "new", False)


def test_plots_take_the_page_s_colour_and_no_formulas() -> None:
    layers = [{"name": f"model.layers.{i}.mlp", "format": "int4", "relative_error": 10.0**-i} for i in range(3)]
    models = [model(str(i), label=f"_$x_{i}$<&", bin_bytes=i << 20, kl=0.1 * i, layers=layers) for i in range(1, 10)]
    for svg in (size_against_loss(models, "kl"), layer_errors(models)):
        assert (
            "currentColor" in svg
            and "#010203" not in svg
            and "http" not in svg.replace('"http://www.w3.org/2000/svg"', "").replace('"http://www.w3.org/1999/xlink"', "")
        )
        assert all(f"{i}  _$x_{i}$&lt;&amp;" in svg for i in range(1, 10))
    assert "(MiB)" in size_against_loss(models, "kl") and "log scale" in layer_errors(models)
    assert layer_errors(models) == layer_errors(models)


def test_a_model_looks_the_same_in_every_plot() -> None:
    layers = [{"name": "m", "format": "int4", "relative_error": 0.01}]
    models = [model(str(i), bin_bytes=i << 20, kl=0.1 * i, layers=layers) for i in (1, 2, 3)]
    assert (
        COLORS[2] in size_against_loss(models, "kl") and COLORS[2] in layer_errors(models[2:]) and COLORS[0] not in layer_errors(models[2:])
    )
