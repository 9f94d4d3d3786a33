"""Second-order rounding against the paper's own form, and never worse than plain rounding whatever the inputs were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmcomp import formats
from llmcomp.algorithms.gptq import Rounded, gptq, gptq_errors
from llmcomp.algorithms.hessian import DAMPING, Order, factorize
from tests.algorithms.hessians import decoded, given, hard, inputs, moments, plain, weights
from tests.reference import gptq as reference

NAMES = formats.names()
ORDERS: tuple[Order, ...] = ("activation", "group")


def rounded(name: str, w: np.ndarray, h: np.ndarray, **options: Any) -> Rounded:
    fmt = formats.get(name)
    return gptq(fmt, w, h, fmt.group_size, **given(fmt, w, h), **options)


def back(name: str, found: Rounded) -> np.ndarray:
    return decoded(formats.get(name), found.codes, found.scale, found.zero_point)


def flat(ranges: np.ndarray | None) -> np.ndarray | None:
    return None if ranges is None else ranges[..., 0]


@pytest.mark.parametrize("name", NAMES)
def test_activation_order_gives_the_paper_s_weights(name: str) -> None:
    fmt, w, h = formats.get(name), weights(), moments(inputs())
    grid = given(fmt, w, h)
    size = formats.grouped_shape(w.shape, fmt.group_size)[-1]
    want = reference.by_activation(fmt, w, h, size, flat(grid["scale"]), flat(grid.get("zero_point")), DAMPING)
    found = rounded(name, w, h)
    kept = found.loss < found.before
    assert kept.mean() > 0.9
    # A weight within f32's rounding (some 1e-6 steps) of a tie may go either way, and takes the rest of its row along: of 24 rows at most one.
    same = np.isclose(back(name, found), want, rtol=1e-5, atol=1e-9).all(axis=1)
    assert (same | ~kept).sum() >= len(w) - 1
    np.testing.assert_allclose(found.loss[kept & same], reference.loss(w, want, h)[kept & same], rtol=1e-3)


@pytest.mark.parametrize("name", ["int4_sym", "int4_asym", "nf4", "mxfp4", "nvfp4"])
def test_columns_with_factors_change_by_what_the_textbook_changes_the_products_by(name: str) -> None:
    fmt, w, h = formats.get(name), weights(), moments(inputs())
    size = formats.grouped_shape(w.shape, fmt.group_size)[-1]
    factor = factorize(h, size)
    assert factor is not None
    ts = [np.ones(w.shape[1], np.float32), np.exp(np.random.default_rng(7).normal(size=w.shape[1])).astype(np.float32)]
    grids = [given(fmt, w * t, h / np.outer(t, t)) for t in ts]
    found = gptq_errors(fmt, w, factor, [(t, grid["scale"], grid.get("zero_point")) for t, grid in zip(ts, grids, strict=True)])
    for t, grid, one in zip(ts, grids, found, strict=True):
        dampened = reference.damped(h, DAMPING) / np.outer(t, t)
        want = reference.in_order(fmt, w * t, dampened, factor.order, size, flat(grid["scale"]), flat(grid.get("zero_point")))
        # As above: a tie takes the rest of its row along.
        same = np.isclose(w + one, want / t, rtol=1e-4, atol=1e-7).all(axis=1)
        assert same.sum() >= len(w) - 2
    assert np.abs(found[0] - found[1]).max() > 1e-3


@pytest.mark.parametrize("name", ["int4_sym", "int4_asym", "int2_sym", "nf4", "fp8_e4m3", "mxfp4", "nvfp4"])
def test_group_order_chooses_the_scales_of_the_textbook(name: str) -> None:
    fmt, w, h = formats.get(name), weights(8), moments(inputs())
    grid = given(fmt, w, h)
    size = formats.grouped_shape(w.shape, fmt.group_size)[-1]
    want = reference.by_group(fmt, w, h, size, flat(grid["scale"]), flat(grid.get("zero_point")), DAMPING)
    found = rounded(name, w, h, order="group")
    # As above; and a refitted scale may round to the next f16.
    same = np.isclose(back(name, found), want, rtol=2e-3, atol=1e-9).all(axis=1)
    assert same.sum() >= len(w) - 2
    np.testing.assert_allclose(found.loss.sum(), reference.loss(w, want, h).sum(), rtol=0.02)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", NAMES)
def test_no_row_is_worse_than_plain_rounding(name: str, order: Order) -> None:
    fmt, w = formats.get(name), weights()
    for case, x in hard().items():
        h = moments(x)
        grid = given(fmt, w, h)
        found = gptq(fmt, w, h, fmt.group_size, **grid, order=order)
        values = back(name, found)
        assert np.isfinite(values).all() and np.isfinite(found.loss).all(), case
        before, after = (reference.loss(w, v, h) for v in (plain(fmt, w, grid), values))
        # Losses are compared in f32: what they lose is 1e-6 of the damped loss, in which dead inputs count.
        slack = 1e-5 * reference.loss(w, values, reference.damped(h, DAMPING))
        assert (after <= before * (1 + 1e-5) + slack).all(), case
    assert case == "one live channel"


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_falls_and_is_that_of_the_outputs(name: str) -> None:
    w, x = weights(), inputs()
    h = moments(x)
    for found in (rounded(name, w, h, order=order) for order in ORDERS):
        outputs = np.square(x @ (w - back(name, found)).T).mean(axis=0)
        np.testing.assert_allclose(found.loss, outputs, rtol=2e-3, atol=1e-12)
        assert found.loss.sum() < 0.75 * found.before.sum()
        assert found.damping == DAMPING


@pytest.mark.parametrize("name", NAMES)
def test_scales_chosen_in_the_loop_are_stored_without_another_rounding(name: str) -> None:
    fmt, w, h = formats.get(name), weights(), moments(inputs())
    found = rounded(name, w, h, order="group")
    live = np.abs(found.scale) > 2.0**-14
    stored = fmt.load_scale(fmt.store_scale(found.scale, "f16", "gptq"))
    np.testing.assert_array_equal(stored[live], found.scale[live])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["int4_sym", "nf4", "nvfp4", "int8_sym"])
def test_rows_do_not_depend_on_one_another(name: str, order: Order) -> None:
    fmt, w, h = formats.get(name), weights(96), moments(inputs())
    grid = given(fmt, w, h)
    whole = gptq(fmt, w, h, fmt.group_size, **grid, order=order)
    halves = [
        gptq(fmt, w[part], h, fmt.group_size, **{n: v[part] for n, v in grid.items()}, order=order) for part in (slice(48), slice(48, 96))
    ]
    np.testing.assert_array_equal(np.concatenate([half.codes for half in halves]), whole.codes)
    np.testing.assert_array_equal(np.concatenate([half.scale for half in halves]), whole.scale)


def test_blocks_are_only_a_matter_of_speed_and_a_factor_serves_many_layers() -> None:
    fmt, w, h = formats.get("int4_sym"), weights(), moments(inputs())
    grid = given(fmt, w, h)
    whole = gptq(fmt, w, h, fmt.group_size, **grid)
    # Sums are in another order, so a near-tie may turn: at most one row.
    assert (gptq(fmt, w, h, fmt.group_size, **grid, block=40).codes != whole.codes).any(axis=(1, 2)).sum() <= 1
    factor = factorize(h, 64)
    assert factor is not None
    np.testing.assert_array_equal(gptq(fmt, w, factor, fmt.group_size, **grid).codes, whole.codes)


def test_a_matrix_that_is_no_second_moment_leaves_plain_rounding() -> None:
    fmt, w = formats.get("int4_sym"), weights()
    h = moments(inputs())
    h[3, 4] = h[4, 3] = 1e4
    grid = given(fmt, w, h)
    found = gptq(fmt, w, h, fmt.group_size, **grid)
    assert found.damping is None
    np.testing.assert_array_equal(back("int4_sym", found), plain(fmt, w, grid))


def test_damping_is_raised_until_the_factor_exists() -> None:
    x = inputs(tokens=4)
    h = moments(x) - 0.03 * np.eye(128, dtype=np.float32) * np.diagonal(moments(x)).mean()
    factor = factorize(h, 64)
    assert factor is not None and factor.damping == pytest.approx(10 * DAMPING)


def test_per_channel_and_any_float_type() -> None:
    fmt, w, h = formats.get("int4_sym"), weights().astype(np.float16), moments(inputs())
    scale = np.float32(np.abs(w).max(axis=1, keepdims=True)) / -8
    for order in ORDERS:
        found = gptq(fmt, w, h, -1, scale, order=order)
        assert found.codes.shape == (24, 1, 128) and found.scale.shape == (24, 1, 1)
        assert found.loss.sum() < 0.6 * found.before.sum()
