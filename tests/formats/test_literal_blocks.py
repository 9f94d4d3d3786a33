"""Blocks worked out by hand from the formats' definitions, byte by byte; and rival rules against those who publish them."""

from __future__ import annotations

import numpy as np
import pytest

from llmcomp import formats
from llmcomp.errors import OptionError
from tests.formats.inputs import CASES


def stored(name: str, w: list[float], group: int, rule: str = "minmax") -> dict[str, list[int]]:
    weight = formats.quantize(formats.get(name), np.array([w], np.float32), group, rule)
    return {part: data.tolist() for part, data in weight.packed().items()}


MX_BLOCK = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 0.1] + [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -5] + [0] * 8
"""E2M1's own values, then the middles between them, which go to the even code."""
MX_BYTES = [0x10, 0x32, 0x54, 0x76, 0xA9, 0xCB, 0xED, 0x0F] + [0x20, 0x42, 0x64, 0xE6] + [0] * 4


@pytest.mark.parametrize(("k", "exponent"), [(0, 127), (-3, 124), (-13, 114), (-15, 112), (5, 132)])
def test_mxfp4(k: int, exponent: int) -> None:
    """A largest magnitude of exactly 6 * 2^k has the scale 2^k, stored as k + 127."""
    found = stored("mxfp4", [x * 2.0**k for x in MX_BLOCK], 32)
    assert found == {"codes": MX_BYTES, "scale": [exponent]}


def test_mxfp4_just_above_its_range() -> None:
    """minmax keeps everything in range, with twice the scale; floor and even cut a little."""
    w = [float(np.nextafter(np.float32(6), np.float32(7))), *[0.0] * 31]
    assert stored("mxfp4", w, 32)["scale"] == [128] and stored("mxfp4", w, 32)["codes"][0] == 0x05
    for rule in ("floor", "even"):
        assert stored("mxfp4", w, 32, rule)["scale"] == [127] and stored("mxfp4", w, 32, rule)["codes"][0] == 0x07
    # From 7 = 4 * 1.75 on, E2M1's one bit of mantissa rounds up to 8: `even` doubles, `floor` does not before 8.
    w[0] = 7.0
    assert stored("mxfp4", w, 32, "even")["scale"] == [128] and stored("mxfp4", w, 32, "floor")["scale"] == [127]
    w[0] = 8.0
    assert stored("mxfp4", w, 32, "floor")["scale"] == [128]


def test_mxfp8() -> None:
    # 448 = 1.75 * 2^8 is byte 0x7E, 1 is 0x38, 2^-9 the least magnitude 0x01; 17 is half way between 16 (0x58) and 18 (0x59).
    w = [448, 1, 2.0**-9, -1, 17, 19, 2.0**-10, 0] + [0] * 24
    codes = [0x7E, 0x38, 0x01, 0xB8, 0x58, 0x5A, 0x00, 0x00] + [0] * 24
    assert stored("mxfp8_e4m3", [float(x) for x in w], 32) == {"codes": codes, "scale": [127]}
    # 480 = 256 * 1.875 needs twice the scale; `floor` cuts it to 448, and so does `even` under 496 = 256 * 1.9375.
    for amax, scales in ((480.0, [128, 127, 127]), (496.0, [128, 127, 128])):
        w[0] = amax
        assert [stored("mxfp8_e4m3", w, 32, rule)["scale"][0] for rule in ("minmax", "floor", "even")] == scales


def test_nvfp4() -> None:
    """Two groups of 16: the f32 scales 1 and 448 make the second order scale 1, and E4M3 bytes 0x38 and 0x7E."""
    first = [6, 3, 1.5, 0.5, -6, -0.5, 0.25, 0] + [0] * 8
    w = [float(x) for x in first] + [448.0 * x for x in first]
    found = stored("nvfp4", w, 16)
    codes = [0x57, 0x13, 0x9F, 0x00, 0, 0, 0, 0]
    assert found == {"codes": codes * 2, "scale": [0x38, 0x7E], "second_order_scale": list(np.float32([1]).tobytes())}
    # With 448 + 448 / 17 the first group's scale would be 0.944 of the second order's: codes are chosen before it is rounded to 0.9375.
    second = 448 + 448 / 17
    weight = formats.quantize(formats.get("nvfp4"), np.float32([[*first, *(second * np.float32(first))]]), 16)
    assert weight.packed()["codes"].tolist() == codes * 2
    assert weight.packed()["scale"].tolist() == [0x37, 0x7E]
    assert weight.dequantize()[0, 0] == np.float32(np.float32(second * 6 / 6) / np.float32(448)) * np.float32(0.9375) * 6


def test_fp4_and_fp8() -> None:
    found = stored("fp4", [3, 1.5, -0.25, 0, 0.0625, 0.1875, 2.5, -3], 8)
    assert found == {"codes": [0x57, 0x09, 0x10, 0xF6], "scale": list(np.float32([0.5]).tobytes())}
    found = stored("fp8_e4m3", [896.0, 2.0, -2.0, 0.0], 4)
    assert found == {"codes": [0x7E, 0x38, 0xB8, 0x00], "scale": list(np.float32([2]).tobytes())}


def test_int3_and_int2() -> None:
    """Levels -4 .. 3 as 0 .. 7, -2 .. 1 as 0 .. 3; the zero point is one i8 for the whole weight."""
    # Codes 0 1 2 3 4 5 6 7: lower bits 00 01 10 11 | 00 01 10 11 from the highest down, upper bits 0000 1111.
    found = stored("int3_sym", [-4, -3, -2, -1, 0, 1, 2, 3], 8)
    assert found == {"codes": [0b00011011, 0b00011011, 0b00001111], "scale": list(np.float32([1]).tobytes()), "zero_point": [4]}
    # A positive extreme has a negative scale, and the lowest level: 4 is -4 times -1, 4.4 would be as well.
    assert stored("int3_sym", [4, -3, 2, 0, 0, 0, 0, 0], 8)["scale"] == list(np.float32([-1]).tobytes())
    found = stored("int2_sym", [-2, -1, 0, 1], 4)
    assert found == {"codes": [0b11100100], "scale": list(np.float32([1]).tobytes()), "zero_point": [2]}


def test_cb4() -> None:
    """The levels themselves have codes 0 .. 15 in ascending order; a middle takes the lower; E4M3 holds the table."""
    levels = [-3.5, -2.5, -1.875, -1.375, -1, -0.625, -0.3125, 0, 0.28125, 0.5625, 0.875, 1.125, 1.5, 2, 2.5, 3.5]
    found = stored("cb4", [*levels, -3.0, 3.0, 0.140625, 0.15], 20)
    assert found["codes"] == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE, 0xE0, 0x87]
    assert found["scale"] == list(np.float32([1]).tobytes())
    assert found["codebook"] == [0xC6, 0xC2, 0xBF, 0xBB, 0xB8, 0xB2, 0xAA, 0x00, 0x29, 0x31, 0x36, 0x39, 0x3C, 0x40, 0x42, 0x46]
    # signed: the scale has the sign of the largest magnitude.
    assert stored("cb4", [-7.0, 2.0], 2, "signed") == {**found, "codes": [0x4F], "scale": list(np.float32([-2]).tobytes())}


def test_nf4_signed() -> None:
    """Under a scale of -2 the weight -2 is level +1; 2, equal in magnitude, then is level -1."""
    assert stored("nf4", [-2, 2, 0, 1], 4, "signed") == {"codes": [0x0F, 0x27], "scale": list(np.float32([-2]).tobytes())}
    assert stored("nf4", [2, -1, 0, 0], 4, "signed")["scale"] == list(np.float32([2]).tobytes())


def test_absolute() -> None:
    """AutoAWQ: the largest magnitude on 7, -8 unused."""
    found = stored("int4_sym", [-7, 7, 3.4, 0], 4, "absolute")
    assert found == {"codes": [0x79, 0x03], "scale": list(np.float32([1]).tobytes())}


@pytest.mark.parametrize("case", CASES)
def test_floor_is_ggufs(case: str) -> None:
    """gguf-py has the one published MXFP4 quantizer that is installed here."""
    import gguf.quants

    blocks = CASES[case].reshape(-1, 32)
    # Under gguf's E8M0 a group may have a scale below 2^-23, which ours never has.
    blocks = blocks[np.abs(blocks).max(1) >= 2.0**-21]
    ours = formats.quantize(formats.get("mxfp4"), blocks, 32, "floor")
    theirs = gguf.quants.MXFP4.quantize_blocks(blocks)
    # Its logarithm is numpy's in f32: what lies a few units below a power of two counts as that.
    amax = np.abs(blocks).max(1)
    exact = np.floor(np.log2(np.float64(amax))) == np.floor(np.log2(amax))
    assert np.array_equal(ours.packed()["scale"][exact], theirs[exact, 0])
    # Of two equally near values it takes the first, so only distances are compared.
    back = gguf.quants.MXFP4.dequantize_blocks(theirs)
    assert np.array_equal(np.abs(np.float64(back) - blocks)[exact], np.abs(np.float64(ours.dequantize()) - blocks)[exact])


def test_codebooks_by_name() -> None:
    book = formats.get("codebook[-1,-0.25,0.5,1]")
    assert formats.get("codebook[-1,-0.25,0.5,1]") is book and book.name == "codebook[-1.0,-0.25,0.5,1.0]"
    assert formats.get(book.name) == book and book.name not in formats.names()
    kinds = {"codebook[-1,0,1]": ("u4", "f8e4m3"), "codebook[0.001,1]": ("u4", "f32"), "codebook[0,1.0625]": ("u4", "f16")}
    kinds[f"codebook[{','.join(map(str, range(17)))}]"] = ("u8", "f8e4m3")
    kinds[f"codebook[{','.join(map(str, range(257)))}]"] = ("u16", "f16")
    for name, (code_type, table_type) in kinds.items():
        parts = {p.name: p for p in formats.get(name).parts((2, 64), 64)}
        assert (parts["codes"].element_type, parts["codebook"].element_type, parts["codebook"].role) == (code_type, table_type, "fixed")
    many = ",".join(map(str, range((1 << 16) + 1)))
    for nonsense in ("", "1", "a,b", "1,1", "2,1", "0,nan", "0,inf", "0,1e39", many):
        with pytest.raises(OptionError, match="codebook"):
            formats.get(f"codebook[{nonsense}]")
    for name in ("codebook", "codebook[0,1", "codebok[0,1]"):
        assert not formats.exists(name)
