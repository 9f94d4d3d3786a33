from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcomp.errors import VerificationError
from llmcomp.planning import Scheme
from llmcomp.writing.verify import choose, verify
from tests.hand import VOCABULARY, hand_graph, weights


def check(mode: str, graph: Any, written: Any) -> str:
    return verify(mode, written.xml, written.journal, graph.layers, written.layout, written.tail, VOCABULARY)


@pytest.mark.parametrize(
    ("mode", "words"), [("structure", "block 0, block 1 and the head ran"), ("full", "the whole model ran"), ("none", "not verified")]
)
def test_a_good_model_passes(tmp_path: Path, write: Callable[..., Any], mode: str, words: str) -> None:
    graph = hand_graph(tmp_path / "skeleton")
    assert words in check(mode, graph, write(graph, tmp_path / "out", Scheme("int4_asym", 32)))


def test_one_flipped_bit_is_found(tmp_path: Path, write: Callable[..., Any]) -> None:
    graph = hand_graph(tmp_path / "skeleton")
    written = write(graph, tmp_path / "out", Scheme("int4_asym", 32))
    path = written.xml.with_suffix(".bin")
    whole = bytearray(path.read_bytes())
    for (name, part), slot in written.layout.slots.items():
        damaged = whole.copy()
        damaged[slot.end - 1] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(VerificationError, match=re.escape(name)):
            check("structure", graph, written)
        assert part in ("codes", "zero_point", "scale")


def test_a_short_bin_is_found(tmp_path: Path, write: Callable[..., Any]) -> None:
    graph = hand_graph(tmp_path / "skeleton")
    written = write(graph, tmp_path / "out", Scheme("int8_sym", -1))
    path = written.xml.with_suffix(".bin")
    path.write_bytes(path.read_bytes()[: written.layout.size - 64])
    with pytest.raises(VerificationError, match="ends behind"):
        check("structure", graph, written)


def test_a_layer_that_was_never_finished_is_found(tmp_path: Path, write: Callable[..., Any]) -> None:
    graph = hand_graph(tmp_path / "skeleton")
    written = write(graph, tmp_path / "out", Scheme("int8_sym", -1))
    lines = written.journal.read_text().splitlines(keepends=True)
    written.journal.write_text("".join(lines[:-1]) + lines[-1].rstrip("\n"))
    with pytest.raises(VerificationError, match="never finished"):
        check("structure", graph, written)


def test_outputs_that_are_not_finite_are_found(tmp_path: Path, write: Callable[..., Any]) -> None:
    arrays = weights(dtype=np.float32)
    for name in ("up", "down"):
        arrays[f"model.layers.1.{name}.weight"] = arrays[f"model.layers.1.{name}.weight"] * np.float32(1e25)
    graph = hand_graph(tmp_path / "skeleton", arrays)
    with pytest.raises(VerificationError, match="block 1"):
        check("structure", graph, write(graph, tmp_path / "out", Scheme("fp32", -1)))


def test_auto_runs_the_whole_model_where_it_fits() -> None:
    assert choose("auto", 1 << 20) == "full"
    assert choose("auto", 1 << 50) == "structure"
    assert choose("none", 1) == "none"
