"""Folds on hand-made graphs: what is found, that it changes nothing, and what must not be folded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from llmcomp.graph.factors import make_factors
from llmcomp.graph.folds import find_folds
from llmcomp.graph.model import ModelGraph
from llmcomp.graph.skeleton import Skeleton
from llmcomp.planning import Scheme
from llmcomp.writing.ir import write_ir
from llmcomp.writing.journal import Journal
from llmcomp.writing.layout import make_layout
from llmcomp.writing.stream import stream
from tests.hand import MemoryCheckpoint, hand_graph
from tests.writing.conftest import count_non_finite

HIDDEN, INNER, HEADS, GROUPS, WIDTH, VOCABULARY = 48, 80, 6, 2, 8, 30


class Builder:
    """Builds a skeleton around weights of its own."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.arrays: dict[str, np.ndarray] = {}
        self.parameters: list[Any] = []
        self.records: list[dict[str, Any]] = []
        self.ids = ops.parameter([-1, -1], ov.Type.i64, name="input_ids")
        self.ids.output(0).set_names({"input_ids"})

    def weight(self, name: str, out: int, width: int) -> Any:
        self.arrays[name] = (self.rng.normal(size=(out, width)) / np.sqrt(width)).astype(np.float32)
        parameter = ops.parameter([out, width], ov.Type.f32, name=f"llmcomp.weight.{len(self.records)}")
        self.records.append({"id": parameter.get_friendly_name(), "tensor": name, "constant": f"self.{name}", "shape": [out, width]})
        self.parameters.append(parameter)
        return parameter

    def linear(self, x: Any, name: str, out: int, width: int, bias: bool = False) -> Any:
        y = ops.matmul(x, self.weight(f"{name}.weight", out, width), False, True, name=name)
        return ops.add(y, self.vector(out)) if bias else y

    def vector(self, size: int, rank: int = 3) -> Any:
        return ops.constant(self.rng.uniform(0.5, 1.5, (1,) * (rank - 1) + (size,)).astype(np.float32))

    def embed(self) -> Any:
        return ops.gather(self.weight("embed.weight", VOCABULARY, HIDDEN), self.ids, ops.constant(0), name="embed")

    def graph(self, logits: Any, folder: Path) -> ModelGraph:
        logits.output(0).set_names({"logits"})
        folder.mkdir(parents=True)
        model = ov.Model([ops.result(logits)], [self.ids, *self.parameters], "hand")
        ov.save_model(model, folder / "skeleton.xml", compress_to_fp16=False)
        manifest = {"task": "text-generation", "model_type": "hand", "weights": self.records, "real": [], "fallback": None}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        skeleton = Skeleton(folder, "text-generation", "hand", tuple(self.records), (), None, False)
        return ModelGraph(skeleton, MemoryCheckpoint(self.arrays))  # type: ignore[arg-type]


def heads(x: Any, count: int) -> Any:
    return ops.transpose(ops.reshape(x, ops.constant([0, -1, count, WIDTH]), True), ops.constant([0, 2, 1, 3]))


def repeated(x: Any) -> Any:
    """[b, groups, n, width] -> [b, heads, n, width], each group for several heads, as repeat_kv does it."""
    batch_and_groups = ops.gather(ops.shape_of(x), ops.constant([0, 1]), ops.constant(0))
    rest = ops.gather(ops.shape_of(x), ops.constant([2, 3]), ops.constant(0))
    target = ops.concat([batch_and_groups, ops.constant([HEADS // GROUPS], np.int64), rest], 0)
    wide = ops.broadcast(ops.unsqueeze(x, ops.constant(2)), target)
    return ops.reshape(wide, ops.constant([0, HEADS, -1, WIDTH]), True)


def decoder(folder: Path, bias: bool = True, fused: bool = False) -> ModelGraph:
    """One decoder block: LayerNorm-like weight and bias, grouped heads, a gated MLP, and an untied head."""
    b = Builder()
    x = b.embed()
    normed = ops.add(ops.multiply(x, b.vector(HIDDEN)), b.vector(HIDDEN)) if bias else ops.multiply(x, b.vector(HIDDEN))
    q_size, kv_size = HEADS * WIDTH, GROUPS * WIDTH
    if fused:
        qkv = b.linear(normed, "qkv", q_size + 2 * kv_size, HIDDEN, bias)
        q, k, v = ops.variadic_split(qkv, ops.constant(2), ops.constant([q_size, kv_size, kv_size])).outputs()
    else:
        q, k, v = (b.linear(normed, n, s, HIDDEN, bias) for n, s in (("q", q_size), ("k", kv_size), ("v", kv_size)))
    attended = ops.scaled_dot_product_attention(heads(q, HEADS), repeated(heads(k, GROUPS)), repeated(heads(v, GROUPS)), causal=True)
    joined = ops.reshape(ops.transpose(attended, ops.constant([0, 2, 1, 3])), ops.constant([0, -1, q_size]), True)
    x = ops.add(x, b.linear(joined, "o", HIDDEN, q_size))
    normed = ops.multiply(b.vector(HIDDEN), x)
    if fused:
        both = b.linear(normed, "gate_up", 2 * INNER, HIDDEN)
        gate, up = ops.variadic_split(both, ops.constant(2), ops.constant([INNER, INNER])).outputs()
    else:
        gate, up = b.linear(normed, "gate", INNER, HIDDEN), b.linear(normed, "up", INNER, HIDDEN)
    x = ops.add(x, b.linear(ops.multiply(ops.swish(gate), up), "down", HIDDEN, INNER))
    return b.graph(b.linear(ops.multiply(x, b.vector(HIDDEN)), "head", VOCABULARY, HIDDEN), folder)


def summary(graph: ModelGraph) -> set[tuple[str, tuple[str, ...], int]]:
    return {(f.writer or "norm", tuple(sorted(f.readers)), int(f.free.sum())) for f in find_folds(graph)}


def test_the_four_sites_of_a_decoder_block(tmp_path: Path) -> None:
    assert summary(decoder(tmp_path / "s")) == {
        ("norm", ("k", "q", "v"), HIDDEN),
        ("v", ("o",), GROUPS * WIDTH),
        ("norm", ("gate", "up"), HIDDEN),
        ("up", ("down",), INNER),
        ("norm", ("head",), HIDDEN),
    }


def test_fused_weights_are_folded_where_they_are_linear(tmp_path: Path) -> None:
    found = summary(decoder(tmp_path / "s", fused=True))
    assert ("qkv", ("o",), GROUPS * WIDTH) in found and ("gate_up", ("down",), INNER) in found
    fold = next(f for f in find_folds(decoder(tmp_path / "t", fused=True)) if f.writer == "gate_up")
    # The gate's half goes through Swish: only the upper half of the rows may change.
    assert not fold.free[:INNER].any() and fold.free[INNER:].all()


def test_grouped_heads_share_their_channels(tmp_path: Path) -> None:
    fold = next(f for f in find_folds(decoder(tmp_path / "s")) if f.writer == "v")
    wanted = np.arange(GROUPS * WIDTH).reshape(GROUPS, 1, WIDTH).repeat(HEADS // GROUPS, axis=1)
    np.testing.assert_array_equal(fold.readers["o"], wanted.reshape(-1))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_logits_change_by_float_rounding_only(tmp_path: Path, bias: bool, fused: bool) -> None:
    graph = decoder(tmp_path / "s", bias, fused)
    folds = find_folds(graph)
    rng = np.random.default_rng(3)
    chosen = {i: np.where(f.free, np.exp(rng.normal(size=f.channels)), 1).astype(np.float32) for i, f in enumerate(folds)}
    factors = make_factors(graph, chosen, folds)
    ids = np.arange(12).reshape(2, 6)
    plain, folded = (run(write_float(graph, tmp_path / n, f), ids) for n, f in (("a", None), ("b", factors)))
    assert not np.array_equal(plain, folded)
    # f32 sums of at most 80 terms, factors of up to e^3 apart.
    np.testing.assert_allclose(folded, plain, rtol=1e-4, atol=1e-4)


def write_float(graph: ModelGraph, folder: Path, factors: Any) -> Path:
    """The model with every weight in fp32, with the factors in it."""
    folder.mkdir()
    schemes = {layer.name: Scheme("fp32", -1) for layer in graph.layers}
    layout = make_layout(graph, schemes, factors.constants if factors else ())
    xml = folder / "openvino_model.xml"
    arguments: dict[str, Any] = {"factors": factors} if factors else {}
    with Journal(folder / "journal.jsonl") as journal:
        _, tail = stream(graph, schemes, layout, xml.with_suffix(".bin"), _never, count_non_finite, journal, 1, **arguments)
    write_ir(graph, schemes, layout, tail, xml, {})
    return xml


def _never(*_: Any) -> Any:
    raise AssertionError("nothing is quantized here")


def run(xml: Path, ids: np.ndarray) -> np.ndarray:
    return np.array(ov.Core().compile_model(xml, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})([ids])[0])


def mlp(folder: Path, middle: Callable[[Builder, Any], Any]) -> ModelGraph:
    """embed -> up -> `middle` -> down -> head."""
    b = Builder()
    y = middle(b, b.linear(b.embed(), "up", INNER, HIDDEN))
    return b.graph(b.linear(b.linear(y, "down", HIDDEN, INNER), "head", VOCABULARY, HIDDEN), folder)


FORBIDDEN: dict[str, Callable[[Builder, Any], Any]] = {
    "not linear": lambda b, y: ops.tanh(y),
    "a square": lambda b, y: ops.multiply(y, y),
    "a product of two paths": lambda b, y: ops.multiply(y, ops.multiply(y, b.vector(INNER))),
    "a sum with another stream": lambda b, y: ops.add(y, ops.tanh(y)),
    "mixed by a softmax": lambda b, y: ops.softmax(y, 2),
    "a constant that another operation reads too": lambda b, y: (lambda c: ops.multiply(ops.add(y, c), ops.relu(c)))(b.vector(INNER)),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_is_not_linear_channel_by_channel_is_left_alone(tmp_path: Path, name: str) -> None:
    assert not [f for f in find_folds(mlp(tmp_path / "s", FORBIDDEN[name])) if f.writer == "up"]


@pytest.mark.parametrize(
    "middle", [lambda b, y: y, lambda b, y: ops.multiply(y, b.vector(INNER)), lambda b, y: ops.add(y, b.vector(INNER))]
)
def test_what_is_linear_channel_by_channel_is_folded(tmp_path: Path, middle: Callable[[Builder, Any], Any]) -> None:
    assert [f for f in find_folds(mlp(tmp_path / "s", middle)) if f.writer == "up"]


def test_a_source_that_the_output_reads_as_well_is_left_alone(tmp_path: Path) -> None:
    b = Builder()
    normed = ops.multiply(b.embed(), b.vector(HIDDEN))
    # The residual reads the norm itself, beside the layer.
    y = ops.add(normed, b.linear(normed, "mix", HIDDEN, HIDDEN))
    graph = b.graph(b.linear(y, "head", VOCABULARY, HIDDEN), tmp_path / "s")
    assert not [f for f in find_folds(graph) if "mix" in f.readers]


def test_a_table_tied_to_the_head_is_left_alone(tmp_path: Path) -> None:
    # hand_graph multiplies by a norm in front of a head that shares the embedding's table.
    assert not [f for f in find_folds(hand_graph(tmp_path / "s")) if "model.embed_tokens" in f.readers]


TWICE: dict[str, Callable[[Builder, Any], Any]] = {
    "a bilinear gate": lambda b, y: ops.multiply(y, b.linear(b.embed(), "gate", INNER, HIDDEN)),
    "a vector behind a layer": lambda b, y: ops.multiply(y, b.vector(INNER)),
    "two vectors": lambda b, y: ops.multiply(ops.add(ops.multiply(ops.tanh(y), b.vector(INNER)), b.vector(INNER)), b.vector(INNER)),
}


@pytest.mark.parametrize("name", TWICE)
def test_columns_that_two_sources_reach_are_folded_once(tmp_path: Path, name: str) -> None:
    graph = mlp(tmp_path / "s", TWICE[name])
    folds = find_folds(graph)
    assert len([f for f in folds if "down" in f.readers]) == 1
    factors = make_factors(graph, {i: np.linspace(0.5, 2, f.channels, dtype=np.float32) for i, f in enumerate(folds)}, folds)
    ids = np.arange(12).reshape(2, 6)
    plain, folded = (run(write_float(graph, tmp_path / n, f), ids) for n, f in (("a", None), ("b", factors)))
    np.testing.assert_allclose(folded, plain, rtol=1e-4, atol=1e-4)
