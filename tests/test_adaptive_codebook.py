"""Tables fitted on the whole path: each layer's own or one across blocks, with data and without; stored, reported, and what the model computes with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import openvino as ov
import pytest

from llmcomp import formats
from llmcomp.errors import OptionError
from llmcomp.export import export, plan_model
from llmcomp.options import ExportOptions
from llmcomp.planning import check_options
from tests.dequantize import dequantized_ir
from tests.test_calibrated import kl, run, source
from tests.test_path import logits

__all__ = ["source"]
PLAIN: dict[str, Any] = {"weight_format": "adaptive_codebook", "group_size": 32, "no_tokenizer": True}


def tables(report: dict[str, Any]) -> dict[str, str]:
    return {layer["name"]: layer["table"] for layer in report["layers"] if layer["format"] == "adaptive_codebook"}


@pytest.mark.parametrize("scope", ["tensor", "blocks"])
def test_without_data_the_model_computes_with_its_tables(source: Path, tmp_path: Path, scope: str) -> None:
    export(ExportOptions(model=str(source / "tiny"), output=tmp_path / "out", codebook_scope=scope, **PLAIN))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    found = tables(report)
    assert len(found) == 14 and all(name.startswith("adaptive_codebook[") for name in found.values())
    check_shared(found, scope == "blocks")
    ids = np.random.default_rng(0).integers(0, 200, (1, 12))
    wanted = logits(dequantized_ir(tmp_path / "out", source / "tiny", tmp_path), ids)
    np.testing.assert_allclose(logits(tmp_path / "out" / "openvino_model.xml", ids), wanted, rtol=1e-3, atol=1e-4)
    assert stored(tmp_path / "out") == {formats.get(name).table for name in found.values()}  # type: ignore[attr-defined]


def check_shared(found: dict[str, str], across_blocks: bool) -> None:
    """Weights of one name have one table in both blocks, or most have not."""
    first, second = ([table for name, table in sorted(found.items()) if f"layers.{block}." in name] for block in (0, 1))
    same = sum(a == b for a, b in zip(first, second, strict=True))
    assert same == 7 if across_blocks else same < 4


def stored(folder: Path) -> set[tuple[float, ...]]:
    """The tables of the written model."""
    model = ov.Core().read_model(folder / "openvino_model.xml")
    constants = [n for n in model.get_ops() if n.get_friendly_name().endswith("/codebook")]
    return {tuple(node.data.view(ml_dtypes.float8_e4m3fn).astype(np.float32).tolist()) for node in constants}


def test_fitted_levels_lose_less_than_cb4(source: Path, tmp_path: Path) -> None:
    errors = {}
    for name, rule in (("cb4", "search"), ("adaptive_codebook", "auto")):
        asked = {**PLAIN, "weight_format": name, "scale_rule": rule}
        report = export(ExportOptions(model=str(source / "tiny"), output=tmp_path / name, **asked)).report
        errors[name] = sum(layer["relative_error"] for layer in report["layers"] if layer["format"] == name)
        sizes = report["bytes"]["weights"]
        errors[name + " bytes"] = sizes
    assert errors["adaptive_codebook"] < 0.95 * errors["cb4"]
    assert errors["adaptive_codebook bytes"] == errors["cb4 bytes"]


@pytest.mark.parametrize(
    "methods",
    [
        {"awq": True},
        {"scale_estimation": True, "awq": True, "gptq": True},
        {"gptq": True, "lora_correction": True, "codebook_scope": "blocks"},
    ],
    ids="+".join,
)
def test_with_data(source: Path, tmp_path: Path, methods: dict[str, Any]) -> None:
    report = run(source, tmp_path / "out", **{**PLAIN, **methods})
    found = tables(report)
    assert len(found) == 14 and all(name.startswith("adaptive_codebook[") for name in found.values())
    check_shared(found, methods.get("codebook_scope") == "blocks")
    told = [layer["calibration"] for layer in report["layers"] if layer["calibration"]]
    assert all(line["loss"] <= line["plain_loss"] for line in told)
    assert kl(source, tmp_path / "out") < 0.5
    assert stored(tmp_path / "out") == {formats.get(name).table for name in found.values()}  # type: ignore[attr-defined]


def test_only_single_layers(source: Path, tmp_path: Path) -> None:
    asked = {"weight_format": "int4_sym", "override": ["*.down_proj=adaptive_codebook:32"], "group_size": 32, "no_tokenizer": True}
    plan = plan_model(ExportOptions(model=str(source / "tiny"), codebook_scope="blocks", **asked))
    (tmp_path / "plan.json").write_text(plan.to_json())
    report = export(
        ExportOptions(model=str(source / "tiny"), output=tmp_path / "out", plan=tmp_path / "plan.json", no_tokenizer=True)
    ).report
    assert len(tables(report)) == 2 and len(set(tables(report).values())) == 1


def test_a_scope_of_nothing_is_refused() -> None:
    with pytest.raises(OptionError, match=r"--codebook-scope.*fitted"):
        check_options(ExportOptions(model="m", codebook_scope="blocks"))
