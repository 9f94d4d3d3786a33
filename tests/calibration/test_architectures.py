"""Folds and permutations are exact on every architecture that calibration divides: the logits of a float export change by float rounding only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmcomp import checkpoint as checkpoints
from llmcomp.graph.factors import NO_FACTORS, make_factors
from llmcomp.graph.folds import find_folds
from llmcomp.graph.inner import find_inner, reorder
from llmcomp.graph.model import ModelGraph
from llmcomp.graph.skeleton import get_skeleton
from tests.calibration.architectures import CONFIGS, save
from tests.graph.test_folds import write_float
from tests.test_path import logits

FOLDS = {
    "llama": 8,
    "qwen3": 8,
    "phi3": 8,
    "gemma": 8,
    "gemma3_text": 8,
    # v has a norm of its own.
    "gemma4_text": 6,
    # LayerNorm into c_attn and c_fc; v into c_proj; Gelu has no fold.
    "gpt2": 6,
    # As gpt2, and fc1 through its ReLU into fc2.
    "opt": 8,
    # No fold reaches into the stack of experts.
    "qwen3_moe": 4,
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
    graph = ModelGraph(get_skeleton(opened), opened)
    folds = [fold for fold in find_folds(graph) if not any(layer.last for layer in graph.layers if layer.name in fold.readers)]
    assert len(folds) == FOLDS[name]
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
