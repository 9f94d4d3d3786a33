"""Export with the inner channels of MLPs sorted: where it happens, that it is told, and that a damaged weight is still named by its own place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcomp import checkpoint as checkpoints
from llmcomp.errors import NonFiniteWeightError
from llmcomp.export import export, plan_model
from llmcomp.graph.model import ModelGraph
from llmcomp.graph.skeleton import get_skeletons
from llmcomp.options import ExportOptions
from llmcomp.permuting import choose_inner, permute
from tests.dequantize import dequantized_ir
from tests.test_path import logits
from tests.tiny import save_shards, tiny_llama

IDS = np.random.default_rng(5).integers(3, 260, (1, 24))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMCOMP_CACHE", str(tmp_path_factory.mktemp("cache")))
        folder = tmp_path_factory.mktemp("source")
        tensors = tiny_llama(folder / "tiny")
        rng = np.random.default_rng(1)
        for name, w in tensors.items():
            if name.endswith("down_proj.weight"):
                # Columns of very different sizes, all mixed up: a tenth to ten times.
                w[:] = w * (10 ** rng.uniform(-1, 1, w.shape[1])).astype(w.dtype)
        save_shards(folder / "tiny", tensors)
        yield folder


def run(source: Path, out: Path, **options: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {"weight_format": "int4_sym", "group_size": 32, "folds": "none", "no_tokenizer": True, **options}
    export(ExportOptions(model=str(source / "tiny"), output=out, **asked))
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report


def test_groups_of_like_columns_lose_less_and_cost_nothing(source: Path, tmp_path: Path) -> None:
    wanted = run(source, tmp_path / "float", weight_format="fp32", group_size=None)
    mixed, sorted_ = run(source, tmp_path / "mixed"), run(source, tmp_path / "sorted", permutation="sorted")
    assert wanted["permuted"] == mixed["permuted"] == []
    stem = "model.layers.{}.mlp.{}_proj"
    assert sorted_["permuted"] == [
        {"rows": [stem.format(i, "up"), stem.format(i, "gate")], "columns": [stem.format(i, "down")], "channels": 160} for i in range(2)
    ]
    assert sorted_["bytes"] == mixed["bytes"] and "2 MLPs" in (tmp_path / "sorted" / "report.md").read_text()
    errors = [{layer["name"]: layer["relative_error"] for layer in report["layers"]} for report in (mixed, sorted_)]
    for name, error in errors[0].items():
        # Rows are rounded as before, in another order; columns by scales of their like.
        assert errors[1][name] < 0.8 * error if name.endswith("down_proj") else errors[1][name] <= 1.3 * error
    z, *others = (logits(tmp_path / name / "openvino_model.xml", IDS) for name in ("float", "mixed", "sorted"))
    plain, better = (float(np.square(other - z).mean()) for other in others)
    assert better < plain


def test_the_written_model_is_the_sorted_weights(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out", permutation="sorted", folds="auto")
    wanted = logits(dequantized_ir(tmp_path / "out", source / "tiny", tmp_path), IDS)
    # f32 sums of 160 terms, in kernels of another order.
    np.testing.assert_allclose(logits(tmp_path / "out" / "openvino_model.xml", IDS), wanted, rtol=1e-3, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize(
    "options",
    [
        {"permutation": "none"},
        {"weight_format": "int8_sym", "group_size": None},
        {"group_size": -1},
        {"override": ("*.down_proj=int8_asym",)},
    ],
)
def test_only_where_low_bit_weights_have_groups_along_them(source: Path, options: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"weight_format": "int4_sym", "group_size": 32, "permutation": "sorted", "no_tokenizer": True, **options}
    plan = plan_model(ExportOptions(model=str(source / "tiny"), **asked))
    opened = checkpoints.open(str(source / "tiny"))
    assert choose_inner(ModelGraph(get_skeletons(opened)[0], opened), plan) == ()


def test_columns_come_out_sorted_and_rows_with_them(source: Path) -> None:
    plan = plan_model(
        ExportOptions(model=str(source / "tiny"), weight_format="int4_sym", group_size=32, permutation="sorted", no_tokenizer=True)
    )
    opened = checkpoints.open(str(source / "tiny"))
    graph = ModelGraph(get_skeletons(opened)[0], opened)
    moved, _ = permute(graph, choose_inner(graph, plan))
    by_name = {layer.name: layer for layer in graph.layers}

    def matrix(of: ModelGraph, part: str) -> np.ndarray:
        layer = by_name[f"model.layers.1.mlp.{part}_proj"]
        return np.asarray(of.rows(layer, 0, layer.shape[0]), np.float64)

    means = np.abs(matrix(moved, "down")).mean(axis=0)
    assert (np.diff(means) <= 0).all()
    order = np.argsort(-np.abs(matrix(graph, "down")).mean(axis=0), kind="stable")
    for part in ("gate", "up"):
        np.testing.assert_array_equal(matrix(moved, part), matrix(graph, part)[order])


@pytest.mark.parametrize("part", ["gate", "down"])
def test_a_weight_that_is_not_finite_is_named_by_its_place_in_the_checkpoint(source: Path, tmp_path: Path, part: str) -> None:
    tensors = tiny_llama(tmp_path / "bad")
    tensors[f"model.layers.0.mlp.{part}_proj.weight"][3, 5] = np.nan
    save_shards(tmp_path / "bad", tensors)
    options = ExportOptions(
        model=str(tmp_path / "bad"), output=tmp_path / "out", weight_format="int4_sym", permutation="sorted", no_tokenizer=True
    )
    with pytest.raises(NonFiniteWeightError, match=rf"{part}_proj.weight.*row 3, column 5"):
        export(options)
    assert not (tmp_path / "out").exists()
