"""Which formats the CPU plugin computes with as they are stored (openvino 2026.3): the report says so, and this is how we know."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcomp import formats
from llmcomp.planning import Scheme
from tests.hand import hand_graph, weights
from tests.packed import decompressed_each_run, packed_types

KEPT = {
    "int8_asym": "u8",
    "int8_sym": "i8",
    "int4_asym": "u4",
    "int4_sym": "i4",
    "int2_sym": "u2",
    "nf4": "nf4",
    "fp4": "f4e2m1",
    "mxfp4": "f4e2m1",
    "nvfp4": "f4e2m1",
}
"""Format -> element type of the matrix that FullyConnected reads."""
EACH_RUN = {"fp8_e4m3": "f8e4m3", "mxfp8_e4m3": "f8e4m3", "cb4": "u8", "adaptive_codebook": "u8", "codebook[-1,-0.3,0,0.3,1]": "u8"}
"""Format -> element type of a constant that the chain turns into floats at every run; 4-bit indices become bytes at load."""
AT_LOAD = ("int3_sym",)
"""Decompressed to f32 once, at load."""


@pytest.mark.parametrize("group", [-1, 16, 32])
@pytest.mark.parametrize("name", [*KEPT, *EACH_RUN, *AT_LOAD])
def test_what_the_plugin_keeps(tmp_path: Path, write: Callable[..., Any], name: str, group: int) -> None:
    fmt = formats.get(name)
    if fmt.fixed_group and group != fmt.group_size:
        pytest.skip("the format has one size only")
    # The table is u8 in all cases, for the Gather and the head.
    xml = write(hand_graph(tmp_path / "skeleton"), tmp_path / "out", Scheme(name, group), Scheme("int8_asym", -1)).xml
    assert packed_types(xml) == {"u8"} | ({KEPT[name]} if name in KEPT else set()) | ({"f32"} if name in AT_LOAD else set())
    assert decompressed_each_run(xml) == ({EACH_RUN[name]} if name in EACH_RUN else set())


def test_every_format_is_looked_at() -> None:
    assert set(formats.names()) <= {*KEPT, *EACH_RUN, *AT_LOAD}


@pytest.mark.parametrize("name", [n for n in KEPT if not formats.get(n).scale_type])
def test_f32_scales_change_nothing(tmp_path: Path, write: Callable[..., Any], name: str) -> None:
    """Scales that f16 cannot hold: the chain computes in f32, and the codes stay packed."""
    arrays = weights(dtype=np.float32)
    for part in ("up", "down", "conv"):
        for i in range(2):
            arrays[f"model.layers.{i}.{part}.weight"] = arrays[f"model.layers.{i}.{part}.weight"] * np.float32(1e8)
    written = write(hand_graph(tmp_path / "skeleton", arrays), tmp_path / "out", Scheme(name, 32), Scheme("int8_asym", -1))
    assert len(written.tail) == 6
    assert packed_types(written.xml) == {"u8", KEPT[name]}
