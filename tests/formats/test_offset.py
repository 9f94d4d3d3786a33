"""Integers less a zero point that is none: what the chain says, the runtime computes."""

from __future__ import annotations

import numpy as np
import pytest

from llmcomp import formats
from llmcomp.errors import OptionError
from llmcomp.formats import CompressedWeight


@pytest.mark.parametrize("scale_type", ["f16", "f32"])
@pytest.mark.parametrize("bits", [4, 8])
def test_codes_less_a_fraction(bits: int, scale_type: str) -> None:
    fmt, rng = formats.get(f"offset[{bits}]"), np.random.default_rng(0)
    codes = rng.integers(0, 1 << bits, (6, 2, 32)).astype(np.uint8)
    scale = rng.uniform(0.01, 0.02, (6, 2, 1)).astype(np.float16 if scale_type == "f16" else np.float32)
    zeros = rng.uniform(-3, 9, (6, 2, 1)).astype(np.float32)
    weight = CompressedWeight(fmt, (6, 64), 32, codes, scale, zeros, "stored")
    wanted = [(np.float32(code) - zeros[i, j, 0]) * np.float32(scale[i, j, 0]) for i in range(6) for j in range(2) for code in codes[i, j]]
    np.testing.assert_array_equal(weight.dequantize().reshape(-1), np.array(wanted, np.float32))
    packed = weight.packed()
    parts = fmt.parts((6, 64), 32, scale_type)
    assert [(part.name, part.element_type) for part in parts] == [("codes", f"u{bits}"), ("zero_point", "f32"), ("scale", scale_type)]
    assert {name: data.size for name, data in packed.items()} == {part.name: part.nbytes for part in parts}
    np.testing.assert_array_equal(formats.unpack(packed["zero_point"], "f32", zeros.shape), zeros)


def test_the_chain_computes_in_f32_whatever_its_scales_are() -> None:
    for scale_type in ("f16", "f32"):
        chain = formats.get("offset[4]").chain((6, 64), 32, scale_type)
        assert chain.op == "Reshape"
        levels, scale = chain.inputs[0].inputs
        assert levels.op == "Subtract" and levels.inputs[0].attr == "f32" and levels.inputs[1].attr == "zero_point"
        assert (scale.op, scale.attr) == (("Convert", "f32") if scale_type == "f16" else ("Part", "scale"))


def test_nothing_is_rounded_to_it() -> None:
    with pytest.raises(OptionError, match="rounds nothing"):
        formats.quantize(formats.get("offset[4]"), np.ones((2, 32), np.float32), 32)
    assert not any(name.startswith("offset") for name in formats.names()) and formats.exists("offset[8]")
