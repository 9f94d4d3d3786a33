"""Each quality level on a two-layer model: what it does to the layers, at no more bytes than the one below it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmcomp.errors import BudgetError
from llmcomp.export import export, plan_model
from llmcomp.options import build
from tests.tiny import tiny_llama

SMALL = {"num_samples": 4, "sequence_length": 32}
TEXT = "The ferry left at seven, and nobody complained; the harbour lay flat as a plate. " * 40


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint whose sizes 64 divides, and text; one skeleton cache for the module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMCOMP_CACHE", str(tmp_path_factory.mktemp("cache")))
        folder = tmp_path_factory.mktemp("source")
        tiny_llama(folder / "tiny", hidden_size=128, num_attention_heads=8, intermediate_size=192)
        (folder / "text.txt").write_text(TEXT)
        yield folder


def run(source: Path, output: Path, **options: Any) -> dict[str, Any]:
    return dict(export(build({"model": str(source / "tiny"), "output": output, **options})).report)


def size(folder: Path) -> int:
    return sum((folder / f"openvino_model.{kind}").stat().st_size for kind in ("xml", "bin"))


def test_the_levels(source: Path, tmp_path: Path) -> None:
    text = {"dataset": str(source / "text.txt"), **SMALL}
    given: dict[str, dict[str, Any]] = {"fast": {}, "balanced": text, "high": text, "best": SMALL}
    reports = {name: run(source, tmp_path / name, quality=name, no_tokenizer=True, **options) for name, options in given.items()}
    inner = {name: [line for line in report["layers"] if ".layers." in line["name"]] for name, report in reports.items()}
    assert {line["rule"] for line in inner["fast"]} == {"minmax"} and not reports["fast"]["budget"]
    assert {(line["rule"], line["rounding"]) for line in inner["balanced"]} == {("scale_estimation", "nearest")}
    assert {(line["rule"], line["rounding"]) for line in inner["high"]} == {("scale_estimation", "gptq")}
    low = [line for line in inner["best"] if line["format"] != "int8_asym"]
    assert low and {(line["rule"], line["rounding"]) for line in low} == {("scale_estimation", "gptq")}
    for name in ("balanced", "high", "best"):
        assert all("alpha" in fold for fold in reports[name]["folds"])
    assert reports["best"]["settings"]["dataset"] == "auto" and "own text" in reports["best"]["seconds"]
    # What the report and the .xml say of the options themselves is longer, hence a few hundred bytes of .xml between the first three.
    sizes = {name: report["bytes"]["bin"] for name, report in reports.items()}
    assert sizes["fast"] == sizes["balanced"] == sizes["high"]
    assert reports["best"]["budget"]["requested"] >= size(tmp_path / "best") == reports["best"]["budget"]["reached"]
    assert "measure" in reports["best"]["seconds"]


def test_a_level_takes_the_users_data_and_his_last_word(source: Path, tmp_path: Path) -> None:
    report = run(
        source, tmp_path / "out", quality="high", dataset=str(source / "text.txt"), gptq=False, awq=False, no_tokenizer=True, **SMALL
    )
    assert "own text" not in report["seconds"] and {line["rounding"] for line in report["layers"]} == {"nearest"}
    assert not any("alpha" in fold for fold in report["folds"])


def test_a_budget_is_measured_in_place_and_the_plan_is_the_exports(source: Path, tmp_path: Path) -> None:
    given = {"target_bpw": 5.5, "dataset": str(source / "text.txt"), "no_tokenizer": True, **SMALL}
    report = run(source, tmp_path / "out", **given)
    plan = plan_model(build({"model": str(source / "tiny"), **given}))
    assert [line["format"] for line in report["layers"]] == [line.format for line in plan.layers]
    assert report["budget"]["reached"] <= 5.5 and report["budget"]["nats"] > 0 and not report["warnings"]


def test_a_size_is_refused_before_anything_is_measured(source: Path, tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match=r"--target-bpw 2: the smallest model .* has 4\.\d+ bits"):
        run(source, tmp_path / "out", target_bpw=2.0)
    assert not list(tmp_path.iterdir())
