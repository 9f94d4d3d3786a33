"""Inner dimensions of MLPs on hand-made graphs: what is found, that another order changes nothing, and what must keep its order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from openvino import opset13 as ops

from llmcomp.graph.factors import NO_FACTORS
from llmcomp.graph.inner import find_inner, reorder
from llmcomp.graph.model import ModelGraph, Order
from tests.graph.test_folds import HIDDEN, INNER, VOCABULARY, Builder, decoder, mlp, run, write_float
from tests.hand import hand_graph, weights


def summary(graph: ModelGraph) -> list[tuple[dict[str, tuple[int, ...]], tuple[str, ...], int]]:
    return [(one.writers, one.readers, len(one.vectors)) for one in find_inner(graph)]


def shuffled(graph: ModelGraph) -> ModelGraph:
    rng = np.random.default_rng(2)
    for one in find_inner(graph):
        graph = reorder(graph, one, rng.permutation(one.channels))
    return graph


def assert_nothing_changes(graph: ModelGraph, folder: Path) -> None:
    ids = np.arange(12).reshape(2, 6)
    plain, moved = (run(write_float(g, folder / name, NO_FACTORS, ()), ids) for g, name in ((graph, "a"), (shuffled(graph), "b")))
    assert (folder / "a" / "openvino_model.bin").read_bytes() != (folder / "b" / "openvino_model.bin").read_bytes()
    # f32 sums of at most 80 terms in another order.
    np.testing.assert_allclose(moved, plain, rtol=1e-5, atol=1e-5)


def test_of_a_decoder_block_only_the_mlp_is_free(tmp_path: Path) -> None:
    graph = decoder(tmp_path / "s")
    assert summary(graph) == [({"gate": (0,), "up": (0,)}, ("down",), 0)]
    assert_nothing_changes(graph, tmp_path)


def test_both_halves_of_a_fused_weight_move_alike(tmp_path: Path) -> None:
    graph = decoder(tmp_path / "s", fused=True)
    assert summary(graph) == [({"gate_up": (0, INNER)}, ("down",), 0)]
    assert_nothing_changes(graph, tmp_path)


def sliced(b: Builder) -> Any:
    both = b.linear(b.embed(), "both", 2 * INNER, HIDDEN, bias=True)
    halves = [ops.slice(both, ops.constant([i]), ops.constant([i + INNER]), ops.constant([1]), ops.constant([2])) for i in (0, INNER)]
    return b.linear(ops.multiply(ops.gelu(halves[0], "erf"), halves[1]), "down", HIDDEN, INNER)


ALLOWED: dict[str, tuple[Callable[[Builder], Any], int]] = {
    "a bias and a Gelu": (lambda b: b.linear(ops.gelu(b.linear(b.embed(), "up", INNER, HIDDEN, True), "tanh"), "down", HIDDEN, INNER), 1),
    "a Swish of two operations and a vector": (
        lambda b: b.linear(
            (lambda y: ops.multiply(ops.multiply(y, ops.sigmoid(y)), b.vector(INNER, 1)))(b.linear(b.embed(), "up", INNER, HIDDEN)),
            "down",
            HIDDEN,
            INNER,
        ),
        1,
    ),
    "flattened tokens and scalars": (
        lambda b: ops.reshape(
            b.linear(
                ops.reshape(
                    ops.power(b.linear(b.embed(), "up", INNER, HIDDEN), ops.constant(2, np.float32)), ops.constant([-1, INNER]), False
                ),
                "down",
                HIDDEN,
                INNER,
            ),
            ops.constant([2, -1, HIDDEN]),
            False,
        ),
        0,
    ),
    "halves by slices, and a bias of both": (sliced, 1),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_elementwise_is_passed(tmp_path: Path, name: str) -> None:
    b = Builder()
    middle, vectors = ALLOWED[name]
    graph = b.graph(b.linear(ops.tanh(middle(b)), "head", VOCABULARY, HIDDEN), tmp_path / "s")
    found = next(one for one in find_inner(graph) if one.readers == ("down",))
    assert found.channels == INNER and len(found.vectors) == vectors
    assert_nothing_changes(graph, tmp_path)


FORBIDDEN: dict[str, Callable[[Builder, Any], Any]] = {
    "a norm": lambda b, y: ops.mvn(y, ops.constant([2]), True, 1e-5, "inside_sqrt"),
    "a softmax": lambda b, y: ops.softmax(y, 2),
    "a factor that all channels make": lambda b, y: ops.multiply(y, ops.reduce_mean(y, ops.constant([2]), True)),
    "two halves one after the other": lambda b, y: ops.concat(list(reversed(ops.split(y, ops.constant(2), 2).outputs())), 2),
    "heads": lambda b, y: ops.reshape(ops.relu(ops.reshape(y, ops.constant([0, -1, 2]), True)), ops.constant([0, -1, INNER]), True),
    "a constant that another operation reads too": lambda b, y: (lambda c: ops.multiply(ops.add(y, c), ops.relu(c)))(b.vector(INNER)),
    "a table of several rows": lambda b, y: ops.add(y, ops.constant(b.rng.normal(size=(2, 6, INNER)).astype(np.float32))),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_is_not_known_to_be_elementwise_ends_the_search(tmp_path: Path, name: str) -> None:
    assert not [one for one in find_inner(mlp(tmp_path / "s", FORBIDDEN[name])) if one.readers == ("down",)]


def test_channels_that_something_else_reads_keep_their_order(tmp_path: Path) -> None:
    b = Builder()
    y = ops.relu(b.linear(b.embed(), "up", INNER, HIDDEN))
    z = ops.multiply(b.linear(y, "down", HIDDEN, INNER), ops.reduce_max(ops.slice(y, *map(ops.constant, ([0], [3], [1], [2]))), [2], True))
    graph = b.graph(b.linear(ops.tanh(z), "head", VOCABULARY, HIDDEN), tmp_path / "s")
    assert not [one for one in find_inner(graph) if one.readers == ("down",)]


def test_two_layers_that_read_the_same_channels_move_together(tmp_path: Path) -> None:
    b = Builder()
    y = ops.relu(b.linear(b.embed(), "up", INNER, HIDDEN))
    z = ops.multiply(b.linear(y, "down", HIDDEN, INNER), ops.tanh(b.linear(y, "beside", HIDDEN, INNER)))
    graph = b.graph(b.linear(ops.softmax(z, 2), "head", VOCABULARY, HIDDEN), tmp_path / "s")
    assert summary(graph) == [({"up": (0,)}, ("down", "beside"), 0)]
    assert_nothing_changes(graph, tmp_path)


def test_rows_and_columns_come_in_the_asked_order_whatever_the_storage(tmp_path: Path) -> None:
    # hand_graph stores `conv` (in, out), and bf16 goes through another gather than f32.
    arrays = weights(dtype=ml_dtypes.bfloat16)
    graph = hand_graph(tmp_path / "s", arrays)
    rng = np.random.default_rng(0)
    for name in ("model.layers.0.conv", "model.layers.0.down"):
        layer = next(one for one in graph.layers if one.name == name)
        rows, columns = (rng.permutation(n) for n in layer.shape)
        # Twice, the second order on top of the first.
        moved = graph.reordered({name: Order(rows, columns)}, {}).reordered({name: Order(None, columns), "other": Order(rows)}, {})
        stored = arrays[f"{name}.weight"].T if layer.transposed else arrays[f"{name}.weight"]
        wanted = stored[rows][:, columns][:, columns]
        assert layer.transposed == name.endswith("conv")
        np.testing.assert_array_equal(moved.rows(layer, 5, 21), wanted[5:21])
        np.testing.assert_array_equal(moved.stored_rows(layer, 5, 21), stored[5:21])
        np.testing.assert_array_equal(graph.rows(layer, 5, 21), stored[5:21])
