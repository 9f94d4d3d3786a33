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

from llmcomp.graph.factors import NO_FACTORS, Factors, make_factors
from llmcomp.graph.folds import Fold, find_folds
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
    chosen = [np.where(f.free, np.exp(rng.normal(size=f.channels)), 1).astype(np.float32) for f in folds]
    plain, folded = both(graph, tmp_path, folds, chosen)
    assert not np.array_equal(plain, folded)
    # f32 sums of at most 80 terms, factors of up to e^3 apart.
    np.testing.assert_allclose(folded, plain, rtol=1e-4, atol=1e-4)


def both(graph: ModelGraph, folder: Path, folds: tuple[Fold, ...], chosen: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Logits without and with the folds."""
    ids = np.arange(12).reshape(2, 6)
    factors = make_factors(graph, chosen, folds)
    plain, folded = write_float(graph, folder / "a", NO_FACTORS, ()), write_float(graph, folder / "b", factors, folds)
    return run(plain, ids), run(folded, ids)


def write_float(graph: ModelGraph, folder: Path, factors: Factors, folds: tuple[Fold, ...]) -> Path:
    """The model with every weight in fp32, with the factors in it."""
    folder.mkdir()
    schemes = {layer.name: Scheme("fp32", -1) for layer in graph.layers}
    layout = make_layout(graph, schemes, folds)
    xml = folder / "openvino_model.xml"
    with Journal(folder / "journal.jsonl") as journal:
        _, tail = stream(graph, schemes, layout, xml.with_suffix(".bin"), _never, count_non_finite, journal, 1, factors)
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
    plain, folded = both(graph, tmp_path, folds, [np.linspace(0.5, 2, f.channels, dtype=np.float32) for f in folds])
    np.testing.assert_allclose(folded, plain, rtol=1e-4, atol=1e-4)


def rms(x: Any) -> Any:
    """An RMSNorm whose weight is one everywhere, as the exporter leaves it."""
    mean = ops.reduce_mean(ops.power(x, ops.constant(2.0, np.float32)), ops.constant([-1]), True)
    return ops.multiply(x, ops.divide(ops.constant(1.0, np.float32), ops.sqrt(ops.add(mean, ops.constant(1e-5, np.float32)))))


def layer_norm(x: Any) -> Any:
    return ops.mvn(x, ops.constant([-1]), True, 1e-5, "inside_sqrt")


BARE: dict[str, Callable[[Builder, Any], Any]] = {
    "rms": lambda b, x: rms(x),
    "layer norm": lambda b, x: layer_norm(x),
    "layer norm with a bias": lambda b, x: ops.add(layer_norm(x), b.vector(HIDDEN)),
}


def bare(folder: Path, norm: Callable[[Builder, Any], Any], also: Callable[[Any], Any] = ops.abs) -> ModelGraph:
    """x + mix(norm(x)) and a head; `also` of x goes into the sum."""
    b = Builder()
    x = b.embed()
    y = b.linear(norm(b, x), "mix", HIDDEN, HIDDEN)
    return b.graph(b.linear(ops.add(also(x), ops.tanh(y)), "head", VOCABULARY, HIDDEN), folder)


@pytest.mark.parametrize("name", BARE)
def test_a_norm_whose_weight_is_gone_gets_a_multiply(tmp_path: Path, name: str) -> None:
    graph = bare(tmp_path / "s", BARE[name])
    folds = find_folds(graph)
    assert [(f.behind is not None, list(f.readers)) for f in folds] == [(True, ["mix"])]
    plain, folded = both(graph, tmp_path, folds, [np.linspace(0.5, 2, HIDDEN, dtype=np.float32)])
    assert not np.array_equal(plain, folded)
    np.testing.assert_allclose(folded, plain, rtol=1e-4, atol=1e-4)
    written = ov.Core().read_model(tmp_path / "b" / "openvino_model.xml")
    count = len([node for node in written.get_ops() if node.get_friendly_name().endswith("/folded")])
    assert count == 1


def test_a_norm_with_a_weight_gets_no_second_one(tmp_path: Path) -> None:
    graph = bare(tmp_path / "s", lambda b, x: ops.multiply(b.vector(HIDDEN), rms(x)))
    assert [f.behind for f in find_folds(graph)] == [None]


def test_a_bare_norm_that_something_else_reads_is_left_alone(tmp_path: Path) -> None:
    b = Builder()
    y = rms(b.embed())
    graph = b.graph(b.linear(ops.add(y, ops.tanh(b.linear(y, "mix", HIDDEN, HIDDEN))), "head", VOCABULARY, HIDDEN), tmp_path / "s")
    assert not [f for f in find_folds(graph) if f.readers.keys() & {"mix"}]


def test_a_layer_behind_a_gelu_gets_a_product_at_run_time_where_it_may(tmp_path: Path) -> None:
    graph = mlp(tmp_path / "s", lambda b, y: ops.gelu(y, "erf"))
    assert not [f for f in find_folds(graph) if "down" in f.readers]
    folds = [f for f in find_folds(graph, at_run_time=True) if "down" in f.readers]
    assert [(f.source, list(f.readers), int(f.free.sum())) for f in folds] == [("product at run time", ["down"], INNER)]
    plain, folded = both(graph, tmp_path, tuple(folds), [np.linspace(0.5, 2, INNER, dtype=np.float32)])
    assert not np.array_equal(plain, folded)
    np.testing.assert_allclose(folded, plain, rtol=1e-4, atol=1e-4)


def test_an_input_that_something_else_reads_gets_no_product(tmp_path: Path) -> None:
    b = Builder()
    x = ops.tanh(b.embed())
    graph = b.graph(b.linear(ops.tanh(ops.add(x, b.linear(x, "mix", HIDDEN, HIDDEN))), "head", VOCABULARY, HIDDEN), tmp_path / "s")
    assert [list(f.readers) for f in find_folds(graph, at_run_time=True)] == [["head"]]
