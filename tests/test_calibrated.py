"""Calibrated export of a two-layer model: every method and combination, what is refused, and that the same input gives the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcomp.errors import NonFiniteWeightError, OptionError
from llmcomp.export import dry_run, export
from llmcomp.options import ExportOptions
from llmcomp.progress import Progress
from tests.packed import packed_types
from tests.test_path import logits
from tests.tiny import save_shards, tiny_llama

TEXT = "The ferry left at seven, and nobody complained; the harbour lay flat as a plate. " * 40
METHODS: tuple[dict[str, Any], ...] = (
    {"awq": True},
    {"scale_estimation": True},
    {"gptq": True},
    {"awq": True, "scale_estimation": True},
    {"awq": True, "scale_estimation": True, "gptq": True},
    {"gptq": True, "target_correction": True},
    {"awq": True, "gptq": True, "target_correction": True},
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint, its float export, and text; one skeleton cache for the module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMCOMP_CACHE", str(tmp_path_factory.mktemp("cache")))
        folder = tmp_path_factory.mktemp("source")
        tiny_llama(folder / "tiny")
        (folder / "text.txt").write_text(TEXT)
        export(ExportOptions(model=str(folder / "tiny"), output=folder / "float", weight_format="fp32"))
        yield folder


def run(source: Path, out: Path, **options: Any) -> dict[str, Any]:
    data = {"dataset": str(source / "text.txt"), "num_samples": 8, "sequence_length": 64}
    asked: dict[str, Any] = {"weight_format": "int4_sym", "group_size": 32, "no_tokenizer": True, **data, **options}
    export(ExportOptions(model=str(source / "tiny"), output=out, **asked))
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report


def kl(source: Path, out: Path) -> float:
    """Mean KL to the float model over rows of the calibration text's own kind."""
    ids = np.random.default_rng(5).integers(3, 260, (1, 64))
    p, q = (logits(f / "openvino_model.xml", ids)[0].astype(np.float64) for f in (source / "float", out))
    p, q = (z - z.max(-1, keepdims=True) for z in (p, q))
    p, q = (z - np.log(np.exp(z).sum(-1, keepdims=True)) for z in (p, q))
    return float((np.exp(p) * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("methods", METHODS, ids="+".join)
def test_no_layer_is_worse_than_plain_rounding_and_the_model_runs_packed(source: Path, tmp_path: Path, methods: dict[str, Any]) -> None:
    report = run(source, tmp_path / "out", **methods)
    told = {layer["name"]: layer["calibration"] for layer in report["layers"] if layer["calibration"]}
    if set(methods) != {"awq"}:
        assert len(told) == 14
    for name, line in told.items():
        assert 0 < line["loss"] <= line["plain_loss"], name
    if "awq" in methods:
        assert len(report["folds"]) == 8 and all("alpha" in fold for fold in report["folds"])
    if "gptq" in methods:
        assert sum(t["loss"] for t in told.values()) < 0.8 * sum(t["plain_loss"] for t in told.values())
    assert kl(source, tmp_path / "out") < 0.5
    assert "i4" in packed_types(tmp_path / "out" / "openvino_model.xml")


@pytest.mark.parametrize("name", ["int4_asym", "nf4", "mxfp4", "nvfp4", "fp4", "int3_sym", "cb4"])
def test_every_format_can_be_calibrated(source: Path, tmp_path: Path, name: str) -> None:
    group = {} if name in ("mxfp4", "nvfp4") else {"group_size": 32}
    report = run(
        source,
        tmp_path / "out",
        **{"group_size": None, "weight_format": name, "awq": True, "scale_estimation": True, "gptq": True, **group},
    )
    told = [layer["calibration"] for layer in report["layers"] if layer["calibration"]]
    assert len(told) == 14 and all(line["loss"] <= line["plain_loss"] for line in told)
    assert np.isfinite(kl(source, tmp_path / "out"))


def test_the_same_input_gives_the_same_bytes(source: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        run(source, tmp_path / name, awq=True, scale_estimation=True, gptq=True)
    a, b = ((tmp_path / n / "openvino_model.bin").read_bytes() for n in ("a", "b"))
    assert a == b


@pytest.mark.parametrize("methods", [{"scale_estimation": True}, {"gptq": True}], ids="+".join)
def test_columns_are_made_alike_before_any_calibrated_rounding(source: Path, tmp_path: Path, methods: dict[str, Any]) -> None:
    with_folds, without = (run(source, tmp_path / folds, folds=folds, **methods) for folds in ("auto", "none"))
    assert len(with_folds["folds"]) == 8 and not without["folds"]
    name = "model.layers.0.self_attn.q_proj"
    errors = [next(x["calibration"]["plain_loss"] for x in report["layers"] if x["name"] == name) for report in (with_folds, without)]
    assert errors[0] != pytest.approx(errors[1], rel=1e-3)


def test_second_order_rounding_starts_from_the_scales_that_the_report_names(source: Path, tmp_path: Path) -> None:
    models, rules = {}, {}
    for name, asked in {"own": {}, "estimated": {"scale_estimation": True}, "minmax": {"scale_rule": "minmax"}}.items():
        report = run(source, tmp_path / name, gptq=True, **asked)
        rules[name] = {layer["rule"] for layer in report["layers"] if layer["rounding"] == "gptq"}
        models[name] = (tmp_path / name / "openvino_model.bin").read_bytes()
    assert rules == {"own": {"scale_estimation"}, "estimated": {"scale_estimation"}, "minmax": {"minmax"}}
    assert models["own"] == models["estimated"] != models["minmax"]


def test_with_the_target_corrected_the_layers_make_up_for_each_other(source: Path, tmp_path: Path) -> None:
    losses = {}
    for on in (False, True):
        run(source, tmp_path / str(on), gptq=True, target_correction=on)
        losses[on] = kl(source, tmp_path / str(on))
    assert losses[True] < 0.97 * losses[False]


def test_a_plan_whose_correction_has_no_layer_is_refused(source: Path, tmp_path: Path) -> None:
    from llmcomp.export import plan_model

    asked = {"weight_format": "int4_sym", "group_size": 32, "gptq": True, "target_correction": True}
    text = plan_model(ExportOptions(model=str(source / "tiny"), **asked)).to_json()
    assert json.loads(text)["target_correction"]
    (tmp_path / "plan.json").write_text(text.replace('"rounding": "gptq"', '"rounding": "nearest"'))
    with pytest.raises(OptionError, match="target_correction"):
        export(ExportOptions(model=str(source / "tiny"), output=tmp_path / "out", plan=tmp_path / "plan.json", no_tokenizer=True))


def test_without_data_the_model_writes_its_own(source: Path, tmp_path: Path) -> None:
    report = run(source, tmp_path / "out", awq=True, dataset="auto", num_samples=2, sequence_length=16)
    assert "own text" in report["seconds"]
    assert not [p for p in (tmp_path / "out").iterdir() if p.name.startswith(".")]


def test_an_edited_plan_names_the_algorithms(source: Path, tmp_path: Path) -> None:
    from llmcomp.export import plan_model

    asked = {"weight_format": "int4_sym", "group_size": 32, "gptq": True, "scale_estimation": True}
    plan = json.loads(plan_model(ExportOptions(model=str(source / "tiny"), **asked)).to_json())
    kept = plan["layers"][2]["name"]
    plan["layers"][2] |= {"rounding": "nearest", "rule": "minmax"}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    data = {"dataset": str(source / "text.txt"), "num_samples": 8, "sequence_length": 64}
    export(ExportOptions(model=str(source / "tiny"), output=tmp_path / "out", plan=tmp_path / "plan.json", no_tokenizer=True, **data))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    by_name = {layer["name"]: layer for layer in report["layers"]}
    assert by_name[kept]["calibration"] is None and by_name[kept]["rounding"] == "nearest"
    assert sum(layer["calibration"] is not None for layer in report["layers"]) == 13


def test_a_weight_that_is_not_finite_is_named_before_anything_is_calibrated(source: Path, tmp_path: Path) -> None:
    tensors = tiny_llama(tmp_path / "bad")
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors[name][3, 5] = np.nan
    save_shards(tmp_path / "bad", tensors)
    data = {"dataset": str(source / "text.txt"), "num_samples": 8, "sequence_length": 64}
    options = ExportOptions(
        model=str(tmp_path / "bad"), output=tmp_path / "out", weight_format="int4_sym", gptq=True, no_tokenizer=True, **data
    )
    with pytest.raises(NonFiniteWeightError, match=r"o_proj.weight.*row 3, column 5"):
        export(options)
    assert not (tmp_path / "out").exists()


def test_a_dry_run_counts_calibration(source: Path, tmp_path: Path) -> None:
    asked = {"weight_format": "int4_sym", "group_size": 32, "scale_estimation": True, "gptq": True, "awq": True, "no_tokenizer": True}
    told: list[str] = []

    class Face(Progress):
        def warn(self, text: str) -> None:
            told.append(text)

    forecast = dry_run(ExportOptions(model=str(source / "tiny"), output=tmp_path / "out", **asked), Face())
    assert forecast.bin_bytes > 0 and forecast.calibrate_seconds is not None and forecast.more_disk_bytes > 0 and not told


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weight_format": "int8_sym", "awq": True, "group_size": None}, "too little"),
        ({"awq": True, "folds": "none"}, "--folds none"),
        ({"scale_estimation": True, "scale_rule": "minmax"}, "picks the scales"),
        ({"scale_estimation": True, "target_correction": True}, "second-order rounding"),
        ({"target_correction": True}, "Add --gptq"),
        ({}, "looks at data"),
    ],
)
def test_nonsense_is_refused_at_once(source: Path, tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        run(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
