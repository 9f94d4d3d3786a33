"""Folds and permutations are exact on every architecture that calibration divides: the logits of a float export change by float rounding only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcomp import checkpoint as checkpoints
from llmcomp.export import export
from llmcomp.graph.factors import NO_FACTORS, make_factors
from llmcomp.graph.folds import find_folds
from llmcomp.graph.inner import find_inner, reorder
from llmcomp.graph.model import ModelGraph
from llmcomp.graph.skeleton import get_skeletons
from llmcomp.options import ExportOptions
from tests.calibration.architectures import CONFIGS, save
from tests.graph.test_folds import write_float
from tests.test_path import logits

FOLDS = {
    "llama": 8,
    "qwen3": 8,
    "phi3": 8,
    "gemma": 8,
    "gemma3_text": 8,
    "gemma4_text": 8,
    "gpt2": 8,
    # As gpt2, and fc1 through its ReLU into fc2.
    "opt": 8,
    # No fold reaches into the stack of experts.
    "qwen3_moe": 4,
}

AT_RUN_TIME = {
    # v has a norm of its own, so o has no fold.
    "gemma4_text": 2,
    # Gelu has no fold.
    "gpt2": 2,
}
INNER = {
    # Gate and up in one weight; a bias in front of the Gelu; the ReLU behind one. The others have gate and up.
    "phi3": [(1, 0)] * 2,
    "gpt2": [(1, 1)] * 2,
    "opt": [(1, 1)] * 2,
    # A stack of experts keeps its order.
    "qwen3_moe": [],
}
"""(writers, vectors) of each inner dimension"""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "llama" else [pytest.mark.longest]) for n in CONFIGS])
def test_folds_are_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    import torch

    monkeypatch.setenv("LLMCOMP_CACHE", str(tmp_path / "cache"))
    model = save(name, tmp_path / "m")
    opened = checkpoints.open(str(tmp_path / "m"))
    graph = ModelGraph(get_skeletons(opened)[0], opened)
    folds = [
        fold for fold in find_folds(graph, at_run_time=True) if not any(layer.last for layer in graph.layers if layer.name in fold.readers)
    ]
    assert len(folds) == FOLDS[name]
    assert sum(fold.at_run_time for fold in folds) == AT_RUN_TIME.get(name, 0)
    rng = np.random.default_rng(3)
    inner = find_inner(graph)
    assert [(len(one.writers), len(one.vectors)) for one in inner] == INNER.get(name, [(2, 0)] * 2)
    chosen = [np.where(fold.free, np.exp(rng.normal(size=fold.channels)), 1).astype(np.float32) for fold in folds]
    ids = rng.integers(1, 90, (1, 17))
    plain = logits(write_float(graph, tmp_path / "a", NO_FACTORS, ()), ids)
    folded = logits(write_float(graph, tmp_path / "b", make_factors(graph, chosen, folds), tuple(folds)), ids)
    assert not np.array_equal(plain, folded)
    assert np.abs(folded - plain).max() < 1e-4 * np.abs(plain).max()
    for one in inner:
        graph = reorder(graph, one, rng.permutation(one.channels))
    moved = logits(write_float(graph, tmp_path / "c", make_factors(graph, chosen, folds), tuple(folds)), ids)
    assert np.abs(moved - plain).max() < 1e-4 * np.abs(plain).max()
    with torch.no_grad():
        wanted = model(torch.from_numpy(ids)).logits.numpy()
    assert np.abs(plain - wanted).max() < 1e-4 * np.abs(wanted).max()


def test_a_gelu_mlp_gets_a_product_and_its_channels_sorted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMCOMP_CACHE", str(tmp_path / "cache"))
    save("gpt2", tmp_path / "m")

    def run(name: str, **options: Any) -> tuple[np.ndarray, dict[str, Any]]:
        export(ExportOptions(model=str(tmp_path / "m"), output=tmp_path / name, no_tokenizer=True, **options))
        ids = np.random.default_rng(0).integers(1, 96, (1, 60))
        return logits(tmp_path / name / "openvino_model.xml", ids), json.loads((tmp_path / name / "report.json").read_text())

    low: dict[str, Any] = {"weight_format": "int4_sym", "group_size": 32}
    wanted, _ = run("float", weight_format="fp32")
    plain, _ = run("plain", **low, folds="none", scale_rule="minmax")
    found, report = run(
        "out", **low, awq=True, scale_estimation=True, gptq=True, permutation="sorted", dataset="auto", num_samples=8, sequence_length=32
    )
    products = [fold for fold in report["folds"] if fold["from"] == "product at run time"]
    assert [fold["into"] for fold in products] == [[f"transformer.h.{i}.mlp.c_proj"] for i in range(2)]
    assert [(line["rows"], line["columns"]) for line in report["permuted"]] == [
        ([f"transformer.h.{i}.mlp.c_fc"], [f"transformer.h.{i}.mlp.c_proj"]) for i in range(2)
    ]
    assert all("alpha" in fold for fold in report["folds"]) and "the whole model ran" in report["verified"]
    assert "2 by a product at run time" in (tmp_path / "out" / "report.md").read_text()
    assert np.square(found - wanted).mean() < 0.7 * np.square(plain - wanted).mean()
