"""Refinement against a textbook that computes everything anew, and never worse than what it starts from."""

from __future__ import annotations

import numpy as np
import pytest

from llmcomp import formats
from llmcomp.algorithms.gptq import Rounded, gptq
from llmcomp.algorithms.hessian import DAMPING
from llmcomp.algorithms.refine import refine
from llmcomp.formats import NUMPY
from tests.algorithms.hessians import decoded, given, hard, inputs, moments, plain, weights
from tests.reference import gptq as reference
from tests.reference.refine import cost
from tests.reference.refine import refine as textbook

NAMES = formats.names()


def start(fmt: formats.Format, w: np.ndarray, h: np.ndarray) -> Rounded:
    return gptq(fmt, w, h, fmt.group_size, **given(fmt, w, h))


def back(fmt: formats.Format, found: Rounded) -> np.ndarray:
    return decoded(fmt, found.codes, found.scale, found.zero_point)


@pytest.mark.parametrize("name", NAMES)
def test_the_textbook(name: str) -> None:
    fmt, w, h = formats.get(name), weights(), moments(inputs())
    first = start(fmt, w, h)
    size = formats.grouped_shape(w.shape, fmt.group_size)[-1]
    zero_point = None if first.zero_point is None else first.zero_point[..., 0]
    want = textbook(fmt, w, back(fmt, first), h, size, first.scale[..., 0], zero_point, DAMPING, 2)
    found = refine(fmt, w, h, fmt.group_size, first.codes, first.scale, first.zero_point)
    # A near-tie or a scale beside the middle of two f16 may go either way: of 24 rows at most two.
    same = np.isclose(back(fmt, found), want, rtol=1e-5, atol=1e-9).all(axis=1)
    assert same.sum() >= len(w) - 2
    np.testing.assert_allclose(found.loss[same], reference.loss(w, want, h)[same], rtol=2e-3, atol=1e-12)


@pytest.mark.parametrize("name", ["int4_sym", "int4_asym", "mxfp4"])
def test_the_textbook_with_many_blocks(name: str) -> None:
    width = 448
    fmt, w, h = formats.get(name), weights(width=width), moments(inputs(width, 2 * width))
    first = start(fmt, w, h)
    zero_point = None if first.zero_point is None else first.zero_point[..., 0]
    want = textbook(fmt, w, back(fmt, first), h, fmt.group_size, first.scale[..., 0], zero_point, DAMPING, 2)
    found = refine(fmt, w, h, fmt.group_size, first.codes, first.scale, first.zero_point)
    values = back(fmt, found)
    same = np.isclose(values, want, rtol=1e-5, atol=1e-9).all(axis=1)
    # As above; the more columns, the likelier a near-tie.
    assert same.sum() >= len(w) - 6
    np.testing.assert_allclose(found.before, reference.loss(w, back(fmt, first), h), rtol=2e-3, atol=1e-12)
    np.testing.assert_allclose(found.loss, reference.loss(w, values, h), rtol=2e-3, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_every_sweep_lowers_the_damped_loss_of_every_row(name: str) -> None:
    fmt, w, h = formats.get(name), weights(), moments(inputs())
    damped = reference.damped(h, DAMPING)
    found = start(fmt, w, h)
    first, least = found.loss.sum(), cost(w, back(fmt, found), damped)
    for _ in range(3):
        found = refine(fmt, w, h, fmt.group_size, found.codes, found.scale, found.zero_point, sweeps=1)
        now = cost(w, back(fmt, found), damped)
        assert (now <= least * (1 + 1e-5)).all()
        least = now
    assert found.loss.sum() < 0.997 * first


@pytest.mark.parametrize("name", NAMES)
def test_no_row_is_worse_than_plain_rounding(name: str) -> None:
    fmt, w = formats.get(name), weights()
    for case, x in hard().items():
        h = moments(x)
        grid = given(fmt, w, h)
        codes = NUMPY.codes(fmt.encode(NUMPY, w.reshape(*grid["scale"].shape[:2], -1), **grid), fmt.code_type)
        found = refine(fmt, w, h, fmt.group_size, codes, **grid)
        values = back(fmt, found)
        assert np.isfinite(values).all() and np.isfinite(found.loss).all(), case
        before, after = (reference.loss(w, v, h) for v in (plain(fmt, w, grid), values))
        slack = 1e-5 * reference.loss(w, values, reference.damped(h, DAMPING))
        assert (after <= before * (1 + 1e-5) + slack).all(), case


def test_rows_do_not_depend_on_one_another() -> None:
    fmt, w, h = formats.get("int4_sym"), weights(96), moments(inputs())
    first = start(fmt, w, h)
    whole = refine(fmt, w, h, 64, first.codes, first.scale)
    for part in (slice(48), slice(48, 96)):
        half = refine(fmt, w[part], h, 64, first.codes[part], first.scale[part])
        np.testing.assert_array_equal(half.codes, whole.codes[part])
        np.testing.assert_array_equal(half.scale, whole.scale[part])


def test_scales_are_refitted_as_they_are_stored() -> None:
    fmt, w, h = formats.get("int4_sym"), weights(), moments(inputs())
    first = start(fmt, w, h)
    found = refine(fmt, w, h, 64, first.codes, first.scale)
    assert (found.scale != first.scale).mean() > 0.5
    live = np.abs(found.scale) > 2.0**-14
    np.testing.assert_array_equal(found.scale.astype(np.float16).astype(np.float32)[live], found.scale[live])


def test_a_format_with_scales_of_its_own_keeps_them() -> None:
    fmt, w, h = formats.get("mxfp4"), weights(), moments(inputs())
    first = start(fmt, w, h)
    found = refine(fmt, w, h, fmt.group_size, first.codes, first.scale)
    np.testing.assert_array_equal(found.scale, first.scale)
    assert (found.codes != first.codes).any()
