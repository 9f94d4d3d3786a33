"""Which forms a layer has, given those of the tensors that it is made of, and whose rows its codes are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmcomp.checkpoint.encoded import Encoded, Form, Held, Lines
from llmcomp.graph.model import ModelGraph, Source
from llmcomp.graph.pieces import Piece, Pieces
from llmcomp.graph.stored import Stored, stored_layers, stored_lines, stored_methods
from tests.hand import HIDDEN, INNER, hand_graph

UP, DOWN, CONV = ("model.layers.0.up", "model.layers.0.down", "model.layers.0.conv")
SYM, ASYM = Form("int4_sym", 32, "f16"), Form("int4_asym", 32, "f16")
WIDE = replace(ASYM, scale_type="f32")


class Tensor(Encoded):
    """A code tells matrix, line and column: 7 · matrix + line + column, modulo 16."""

    def __init__(self, *forms: Form, reason: str = "", width: int = HIDDEN, method: str = "gptq", second: float = 1.0) -> None:
        self.method, self.forms, self.width, self.second = method, Held(forms, reason), width, second

    @property
    def held(self) -> Held:
        return self.forms

    def lines(self, form: Form, index: int | None, start: int, stop: int) -> Lines:
        codes = (7 * (index or 0) + np.arange(start, stop)[:, None] + np.arange(self.width)) % 16
        per_group = (stop - start, self.width // form.group_size)
        zeros = np.full(per_group, 3, np.uint8) if form.format.endswith("asym") else None
        return Lines(codes.astype(np.uint8), np.arange(start, stop, dtype=np.float32)[:, None] * np.ones(per_group, np.float32), zeros)


class Crosswise(Tensor):
    crosswise = True


@pytest.fixture
def graph(tmp_path: Path) -> ModelGraph:
    return hand_graph(tmp_path)


def of(graph: ModelGraph, monkeypatch: pytest.MonkeyPatch, **tensors: Encoded) -> dict[str, Stored]:
    known = {f"model.layers.0.{name}.weight": tensor for name, tensor in tensors.items()}
    monkeypatch.setattr(graph.checkpoint, "encoded", known.get)
    return stored_layers([graph])


def made_of(graph: ModelGraph, name: str, *matrices: tuple[Piece, ...]) -> None:
    graph.sources[name] = Source(graph.sources[name].layer_id, Pieces(matrices))


def test_one_tensor_is_one_layer(graph: ModelGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    found = of(graph, monkeypatch, up=Tensor(SYM, ASYM), down=Tensor(reason="because", method="fp8"))
    assert found == {UP: Stored("gptq", (SYM, ASYM)), DOWN: Stored("fp8", reason="because")}
    assert stored_methods([graph]) == {"fp8": 1, "gptq": 1}


def test_parts_below_each_other(graph: ModelGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    up, down = "model.layers.0.up.weight", "model.layers.0.down.weight"
    made_of(graph, UP, (Piece(up, 40, start=10), Piece(down, INNER - 40)))
    assert of(graph, monkeypatch, up=Tensor(SYM, ASYM), down=Tensor(WIDE))[UP].forms == (WIDE,)
    layer = next(layer for layer in graph.layers if layer.name == UP)
    lines = stored_lines(graph, layer, ASYM, 38, 42)
    assert lines.scale[:, 0].tolist() == [48, 49, 0, 1] and lines.zero_point is not None and lines.zero_point.shape == lines.scale.shape
    assert lines.codes[:, 0].tolist() == [0, 1, 0, 1]
    assert "different formats" in of(graph, monkeypatch, up=Tensor(SYM), down=Tensor(ASYM))[UP].reason
    assert "only a part" in of(graph, monkeypatch, up=Tensor(SYM))[UP].reason
    ordered = replace(ASYM, sorted=True)
    assert "different orders" in of(graph, monkeypatch, up=Tensor(ordered), down=Tensor(ordered))[UP].reason


def test_scales_of_whole_weights_must_be_one(graph: ModelGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    made_of(graph, UP, (Piece("model.layers.0.up.weight", 40), Piece("model.layers.0.down.weight", INNER - 40)))
    two, four = Form("nvfp4", 16, "f32"), Form("fp4", 16, "f32")
    assert of(graph, monkeypatch, up=Tensor(two, four, second=0.5), down=Tensor(two, four, second=0.5))[UP].forms == (two, four)
    assert of(graph, monkeypatch, up=Tensor(two, four, second=0.5), down=Tensor(two, four, second=0.25))[UP].forms == (four,)


def test_groups_must_run_along_the_rows(graph: ModelGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight of conv is stored (in, out)."""
    assert "across the rows" in of(graph, monkeypatch, conv=Tensor(SYM))[CONV].reason
    assert "across the rows" in of(graph, monkeypatch, up=Crosswise(SYM))[UP].reason
    assert of(graph, monkeypatch, conv=Crosswise(SYM))[CONV].forms == (SYM,)
    conv = "model.layers.0.conv.weight"
    made_of(graph, CONV, (Piece(conv, HIDDEN // 2), Piece(conv, HIDDEN // 2, start=HIDDEN // 2)))
    assert "across the rows" in of(graph, monkeypatch, conv=Crosswise(SYM))[CONV].reason


def test_matrices_of_a_stack(graph: ModelGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    up = "model.layers.0.up.weight"
    made_of(graph, UP, (Piece(up, INNER // 2, index=1),), (Piece(up, INNER // 2, index=3),))
    found = of(graph, monkeypatch, up=Tensor(SYM))
    layer = next(layer for layer in graph.layers if layer.name == UP)
    lines = stored_lines(graph, layer, found[UP].forms[0], INNER // 2 - 1, INNER // 2 + 1)
    assert lines.codes[:, 0].tolist() == [(7 + INNER // 2 - 1) % 16, 21 % 16] and lines.zero_point is None
