"""Which formats hold what is stored, and why none does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from llmcomp import checkpoint, formats
from llmcomp.checkpoint.encoded import integer_formats, run_length, scale_type
from tests.checkpoint.encodings import test_awq, test_bitsandbytes, test_compressed_tensors, test_fp8, test_gptq, test_mxfp4
from tests.checkpoint.encodings.store import bf16, stored


def held(folder: Path, settings: Any, parts: dict[str, np.ndarray]) -> Any:
    opened = checkpoint.open(stored(folder, settings, parts))
    (found,) = [one for name in opened.tensors if (one := opened.encoded(name)) is not None]
    forms = [(form.format, form.group_size, form.scale_type, *([True] if form.sorted else [])) for form in found.held.forms]
    return forms or found.held.reason


@pytest.mark.parametrize(
    ("group", "wanted"),
    [
        (np.zeros(96), -1),
        (np.arange(96) // 32, 32),
        (np.arange(192) // 96, 32),
        (np.arange(256) // 64, 64),
        (np.arange(80) // 32, 16),
        (np.repeat([3, 0, 2, 1], 32), 32),
        (np.arange(40) // 20, None),
        (np.random.default_rng(0).permutation(np.repeat(np.arange(2), 32)), None),
    ],
)
def test_runs_that_share_a_scale(group: np.ndarray, wanted: int | None) -> None:
    assert run_length(group.astype(np.int64)) == wanted


@pytest.mark.parametrize(
    ("low", "high", "zeros", "wanted"),
    [
        (0, 15, [8, 8], ("int4_sym", "int4_asym", "int8_sym", "int8_asym")),
        (0, 15, [7, 7], ("int4_asym", "int8_sym", "int8_asym")),
        (0, 15, [0, 15], ("int4_asym", "int8_asym")),
        (0, 15, [0, 16], ("int8_asym",)),
        (0, 3, [2], ("int2_sym", "int4_sym", "int4_asym", "int8_sym", "int8_asym")),
        (0, 7, [4], ("int4_sym", "int4_asym", "int8_sym", "int8_asym")),
        (0, 255, [128], ("int8_sym", "int8_asym")),
        (-128, 127, None, ("int8_sym", "int8_asym")),
        (-128, 127, [-128, 127], ("int8_asym",)),
        (0, 255, [-1, 0], ()),
    ],
)
def test_integers(low: int, high: int, zeros: list[int] | None, wanted: tuple[str, ...]) -> None:
    assert integer_formats(low, high, None if zeros is None else np.array(zeros)) == wanted


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([1.0, -0.5, 0.0], "f16"),
        ([1.0 + 2**-11], "f32"),
        ([2.0**-24], "f16"),
        ([2.0**-25], "f32"),
        ([8000.0], "f16"),
        # The largest code is -8.
        ([8192.0], "f32"),
        ([1e30], "f32"),
    ],
)
def test_scales_are_f16_where_nothing_is_rounded(values: list[float], wanted: str) -> None:
    assert scale_type(formats.get("int4_sym"), np.array(values, np.float32)) == wanted


def test_forms_of_gptq(tmp_path: Path) -> None:
    def one(bits: int, group: int = 32, folder: str = "x", **more: Any) -> Any:
        parts, _ = test_gptq.made(bits, 96, 64, group, **more)
        return held(tmp_path / folder, test_gptq.settings(bits, group), parts)

    assert one(4) == [("int4_asym", 32, "f16"), ("int8_asym", 32, "f16")]
    assert one(4, -1)[0] == ("int4_asym", -1, "f16")
    assert one(4, sym=True)[0] == ("int4_sym", 32, "f16")
    assert one(4, scale=np.float32)[0] == ("int4_asym", 32, "f32")
    assert one(4, scale=bf16(0).dtype)[0] == ("int4_asym", 32, "f16")
    assert one(2)[0] == ("int4_asym", 32, "f16")
    assert one(2, sym=True)[0] == ("int2_sym", 32, "f16")
    assert one(3, sym=True)[0] == ("int4_sym", 32, "f16")
    assert one(8) == [("int8_asym", 32, "f16")]
    assert one(8, sym=True)[0] == ("int8_sym", 32, "f16")
    order = np.random.default_rng(3).permutation(np.repeat(np.arange(3), 32))
    assert one(4, order=order)[0] == ("int4_asym", 32, "f16", True)
    assert one(4, group=8, order=np.random.default_rng(3).permutation(np.repeat(np.arange(12), 8))) == "fewer than 16 columns share a scale"


def test_forms_of_awq_and_compressed_tensors(tmp_path: Path) -> None:
    parts, _ = test_awq.made(64, 16, 32)
    assert held(tmp_path / "awq", test_awq.SETTINGS, parts)[0] == ("int4_asym", 32, "f16")
    for bits, symmetric, wanted in ((4, True, "int4_sym"), (4, False, "int4_asym"), (2, True, "int2_sym"), (8, True, "int8_sym")):
        parts, _ = test_compressed_tensors.made(bits, 20, 96, 32, symmetric)
        settings = test_compressed_tensors.settings(test_compressed_tensors.scheme(bits, symmetric=symmetric))
        assert held(tmp_path / f"{bits}{symmetric}", settings, parts)[0] == (wanted, 32, "f16")
    parts, _ = test_compressed_tensors.made(4, 20, 96, 48, True)
    settings = test_compressed_tensors.settings(test_compressed_tensors.scheme(size=48))
    assert held(tmp_path / "48", settings, parts)[0] == ("int4_sym", 16, "f16")


def test_forms_of_fp8(tmp_path: Path) -> None:
    def one(width: int, block: list[int] | None, scale: np.ndarray) -> Any:
        parts = {f"{test_fp8.X}.weight": test_fp8.codes((64, width)), f"{test_fp8.X}.weight_scale_inv": scale}
        return held(tmp_path / str(width), {**test_fp8.SETTINGS, "weight_block_size": block}, parts)

    assert one(256, [128, 128], test_fp8.scales((1, 2))) == [("fp8_e4m3", 128, "f32")]
    assert one(256, [128, 128], bf16(test_fp8.scales((1, 2)))) == [("fp8_e4m3", 128, "f16")]
    assert one(320, [32, 128], test_fp8.scales((2, 3))) == [("fp8_e4m3", 64, "f32")]
    assert one(100, None, np.float16(test_fp8.scales((1,)))) == [("fp8_e4m3", -1, "f16")]
    assert "no runs of a power of two" in one(300, [128, 128], test_fp8.scales((1, 3)))
    powers = np.full((1, 2), 120, np.uint8).view(ml_dtypes.float8_e8m0fnu)
    assert one(256, [128, 128], powers) == [("fp8_e4m3", 128, "f16")]


def test_forms_of_mxfp4_and_bitsandbytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert held(tmp_path / "mx", test_mxfp4.SETTINGS, test_mxfp4.made(2, 4, 1)[0]) == [("mxfp4", 32, "f32")]
    assert held(tmp_path / "eight", test_bitsandbytes.EIGHT, test_bitsandbytes.eight()) == [("int8_sym", -1, "f32")]

    def one(out: int, width: int) -> Any:
        return held(tmp_path / f"{out}-{width}", test_bitsandbytes.FOUR, test_bitsandbytes.made(out, width, 64, True)[0])

    ((name, group, scales),) = one(20, 96)
    assert (group, scales) == (32, "f32") and name.startswith("codebook[")
    assert "in the middle of rows of 90" in one(21, 90)
    assert one(12, 16)[0][1] == -1
    monkeypatch.setattr(test_bitsandbytes, "TABLE", np.array(formats.nf4.LEVELS, np.float32))
    assert one(20, 128) == [("nf4", 64, "f32")]


def test_equal_values_of_a_table_are_one_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes' FP4 has both zeros."""
    table = np.array(
        [0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4, -0.0, -1 / 192, -2 / 3, -1, -1 / 3, -1 / 2, -1 / 6, -1 / 4], np.float32
    )
    monkeypatch.setattr(test_bitsandbytes, "TABLE", table)
    parts, weight = test_bitsandbytes.made(20, 128, 64, True, "fp4")
    folder = stored(tmp_path, test_bitsandbytes.FOUR, parts)
    test_bitsandbytes.check_decoded(checkpoint.open(folder), {test_bitsandbytes.X: weight})
    ((name, _, _),) = held(folder, test_bitsandbytes.FOUR, parts)
    assert len(formats.get(name).table) == 15
    monkeypatch.setattr(test_bitsandbytes, "TABLE", np.zeros(16, np.float32))
    assert "its table of values is none of ours" in held(
        tmp_path / "0", test_bitsandbytes.FOUR, test_bitsandbytes.made(20, 128, 64, True)[0]
    )
