"""GGML's blocks, repacked, against the decoders of the package gguf."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from llmcomp import checkpoint
from llmcomp.checkpoint.gguf_codes import KINDS, GGUFCodes
from tests.checkpoint.encodings.store import weight_of
from tests.checkpoint.gguf_file import write_gguf

HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))}
"""Where a block has its f16 numbers; else at its start alone."""
ROWS, WIDTH = 6, 512


def blocks(kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Rows of random bytes, the f16 numbers among them scales; the first two blocks have scales of zero."""
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(int(kind))
    raw = rng.integers(0, 256, (ROWS * WIDTH // size, nbytes)).astype(np.uint8)
    for at in HALVES.get(kind.name, (0,)):
        raw[:, at : at + 2] = rng.uniform(-0.02, 0.02, len(raw)).astype("<f2").view(np.uint8).reshape(-1, 2)
    first = HALVES.get(kind.name, (0,))[0]
    raw[:2, first : first + 2] = 0
    return raw.reshape(ROWS, -1)


@pytest.mark.parametrize("number", KINDS, ids=lambda n: gguf.GGMLQuantizationType(n).name)
def test_codes_are_what_the_blocks_stand_for(number: int) -> None:
    kind = gguf.GGMLQuantizationType(number)
    raw = blocks(kind)
    codes = GGUFCodes(number, kind.name, (ROWS, WIDTH), gguf.GGML_QUANT_SIZES[kind][1], lambda start, stop: raw[start:stop])
    (form,) = codes.held.forms
    wanted = gguf.quants.dequantize(raw, kind)
    for start, stop in ((0, ROWS), (2, 5)):
        found = weight_of(form, codes.lines(form, None, start, stop))
        if not form.format.startswith("offset"):
            np.testing.assert_array_equal(found, wanted[start:stop])
            continue
        # A zero point is a quotient rounded to f32, and so is its distance to a code: three roundings of numbers up to the group's largest.
        largest = np.abs(wanted[start:stop]).reshape(stop - start, -1, form.group_size).max(-1).repeat(form.group_size, -1)
        assert (np.abs(found - wanted[start:stop]) <= 3 * 2.0**-24 * largest).all()
    assert wanted.std() > 0.01


def test_scales_of_f16_stay_f16() -> None:
    for number, kind in KINDS.items():
        one = gguf.GGMLQuantizationType(number)
        raw = blocks(one)
        codes = GGUFCodes(number, one.name, (ROWS, WIDTH), gguf.GGML_QUANT_SIZES[one][1], lambda start, stop, raw=raw: raw[start:stop])
        assert codes.held.forms[0].scale_type == ("f16" if kind.narrow else "f32"), one.name


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q5_1"])
def test_rows_of_a_file(tmp_path: Path, kind: str) -> None:
    """Those of q and k, which llama.cpp has interleaved, among them."""
    wanted = write_gguf(tmp_path / "m.gguf", gguf.GGMLQuantizationType[kind])
    opened = checkpoint.open(tmp_path / "m.gguf")
    for name, values in wanted.items():
        encoded = opened.encoded(name)
        assert (encoded is None) == (values.ndim == 1)
        if encoded is not None:
            (form,) = encoded.held.forms
            assert encoded.method == f"gguf {kind}"
            found = weight_of(form, encoded.lines(form, None, 3, 17))
            np.testing.assert_allclose(found, values[3:17], rtol=0, atol=3 * 2.0**-24 * np.abs(values).max())


def test_other_types_are_not_repacked(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.IQ2_XXS
    codes = GGUFCodes(int(kind), kind.name, (1, 256), 66, lambda start, stop: np.zeros((1, 66), np.uint8)[start:stop])
    assert not codes.held.forms and codes.held.reason
