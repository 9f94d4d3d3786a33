from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmcomp.errors import CheckpointError
from llmcomp.inspect import inspect_folder
from llmcomp.planning import Scheme
from tests.hand import HIDDEN, INNER, VOCABULARY, hand_graph
from tests.writing.conftest import write  # noqa: F401


def test_it_counts_what_was_written(tmp_path: Path, write: Callable[..., Any]) -> None:  # noqa: F811
    written = write(hand_graph(tmp_path / "skeleton"), tmp_path / "out", Scheme("int4_asym", 32), Scheme("int8_asym", -1))
    found = inspect_folder(tmp_path / "out")
    (row,) = (r for r in found.rows if r.element_type == "u4")
    (table,) = (r for r in found.rows if r.element_type == "u8")
    # Small as it is, it is compressed.
    assert table.count == 1 and table.weights == VOCABULARY * HIDDEN
    # Up and down of both blocks, and the two 64 x 64.
    assert row.count == 6 and row.weights == 2 * (2 * HIDDEN * INNER + HIDDEN * HIDDEN) and row.group_size == 32
    assert row.bytes == row.weights // 2 + row.weights // 32 * 2 + row.weights // 64
    assert found.made_by == "llmcomp test" and found.bin_bytes == written.layout.size and found.report is None


def test_what_is_no_ir(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"openvino_model\.xml"):
        inspect_folder(tmp_path)
