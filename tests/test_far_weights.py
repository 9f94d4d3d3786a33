"""Calibrated compression of one layer whose weights are far from ordinary: huge, tiny, both, zeros, one row, one column."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from llmcomp import formats
from llmcomp.adapting import correct
from llmcomp.algorithms.awq import Reader, choose_factors, quadratic_loss
from llmcomp.fitting import fit_table
from llmcomp.planning import Scheme, is_low
from llmcomp.solving import Moments, Solved, errors, solve
from llmcomp.threads import Threads

pytestmark = pytest.mark.filterwarnings("error")
BOOK = "codebook[-1,-0.625,-0.3,-0.1,0,0.125,0.5,1]"
NAMES = [name for name in (*formats.names(), BOOK) if is_low(name) and name != formats.ADAPTIVE]
ROWS, WIDTH = 12, 96
DEAD = 5
METHODS = [("scale_estimation", "nearest"), ("minmax", "gptq"), ("scale_estimation", "gptq")]


def inputs(width: int = WIDTH) -> Moments:
    """Correlated, of unlike power; channel DEAD never fires."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(400, width)) @ (np.eye(width) + 0.3 * rng.normal(size=(width, width)) / np.sqrt(width))
    x *= np.exp(0.5 * rng.normal(size=width))
    x[:, DEAD : DEAD + 1] = 0
    return Moments((x.T @ x / len(x)).astype(np.float32))


def weights() -> np.ndarray:
    return (np.random.default_rng(0).normal(size=(ROWS, WIDTH)) * 0.02).astype(np.float32)


def scheme(name: str, rule: str, rounding: str, width: int = WIDTH) -> Scheme:
    fmt = formats.get(name)
    return Scheme(name, fmt.group_size if fmt.fixed_group else 32 if width % 32 == 0 else -1, rule, rounding)  # type: ignore[arg-type]


def solved(asked: Scheme, w: np.ndarray) -> Solved:
    moments = inputs(w.shape[1])
    with Threads(1) as threads:
        (one,) = solve([(asked, w, w)], moments, threads)
    assert np.isfinite(one.back).all() and np.isfinite([one.told["loss"], one.told["plain_loss"]]).all()
    assert one.told["loss"] <= one.told["plain_loss"]
    return one


def row_losses(one: Solved, w: np.ndarray) -> np.ndarray:
    """Of each row's output, relative to its power."""
    h, d = inputs(w.shape[1]).hessian.astype(np.float64), one.back.astype(np.float64) - w
    wide = w.astype(np.float64)
    return np.einsum("ij,jk,ik->i", d, h, d) / np.maximum(np.einsum("ij,jk,ik->i", wide, h, wide), 1e-300)


@pytest.mark.parametrize(("rule", "rounding"), METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_what_all_weights_are_multiplied_by_changes_nothing(name: str, rule: str, rounding: str) -> None:
    asked, w = scheme(name, rule, rounding), weights()
    usual = solved(asked, w).told
    for power in (-6, 20, 44):
        # A scale is f32 or f16 as it falls, and NVFP4's are cut differently under another f32 scale: of int4's loss 2 %, of that of scales
        # with 3 bits a tenth.
        assert solved(asked, np.ldexp(w, power)).told["loss"] <= usual["loss"] * 1.15, power
    # Squares beyond float32: what searches lets minmax be, and second-order rounding keeps plain codes.
    for power in (100, 130):
        assert solved(asked, np.ldexp(w, power)).told["loss"] <= usual["plain_loss"] * 1.15, power


@pytest.mark.parametrize("name", [name for name in NAMES if name != "nvfp4"])
def test_rows_of_all_sizes_side_by_side(name: str) -> None:
    """Each as near as the rows of an ordinary layer; those below the least scale are zeros, and told. (NVFP4's scales are relative to the
    largest of the whole weight.)"""
    asked, w = scheme(name, "scale_estimation", "gptq"), weights()
    usual = row_losses(solved(asked, w), w).max()
    plain = row_losses(solved(Scheme(name, asked.group_size), w), w).max()
    powers = np.array([0, 20, 100, -6, -60, -120] * 2)
    mixed = np.ldexp(w, powers[:, None])
    one = solved(asked, mixed)
    losses = row_losses(one, mixed)
    # The largest rows decide in which order MXFP4 takes its groups, for all others too.
    near = 1.5 if name == "mxfp4" else 1.3
    assert (losses[(powers >= -6) & (powers < 50)] <= near * usual).all() and (losses[powers >= -6] <= near * max(plain, usual)).all()
    assert not one.back[powers < -50].any()
    assert (formats.faded(mixed, one.weight.scale, one.weight.group_size).all(1) == (powers < -50)).all()


@pytest.mark.parametrize("factor", [1e-9, 1e-20, 1e-30, 1e-42])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_below_the_least_scale_counts_as_lost(name: str, factor: float) -> None:
    w = (weights().astype(np.float64) * factor).astype(np.float32)
    for rule, rounding in METHODS:
        assert solved(scheme(name, rule, rounding), w).told["loss"] == pytest.approx(1, abs=0.25)


def zero_rows(w: np.ndarray) -> None:
    w[3:5] = 0


def zero_group(w: np.ndarray) -> None:
    w[2, 32:64] = 0


def zero_columns(w: np.ndarray) -> None:
    w[:, 7] = 0


def nearly_all(w: np.ndarray) -> None:
    w[1:] = 0


@pytest.mark.parametrize("change", [zero_rows, zero_group, zero_columns, nearly_all])
@pytest.mark.parametrize(("rule", "rounding"), [("search", "nearest"), *METHODS])
@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros_and_cost_the_others_nothing(name: str, rule: str, rounding: str, change: Callable[[np.ndarray], None]) -> None:
    asked, w = scheme(name, rule, rounding), weights()
    usual = solved(asked, w)
    change(w)
    one = solved(asked, w)
    assert not one.back[~w.any(1)].any()
    if rounding == "nearest":
        assert not one.back[w == 0].any()
    # A column of zeros that is read takes its share of what others have lost in second-order rounding; one that is never read does not.
    assert not one.back[:, DEAD][w[:, DEAD] == 0].any()
    # Single rows vary with what falls on which level; all of them together by less than a tenth.
    live = w.any(1)
    if change is not nearly_all:
        assert row_losses(one, w)[live].mean() <= 1.1 * row_losses(usual, weights()).mean()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_but_zeros(name: str) -> None:
    for rule, rounding in METHODS:
        one = solved(scheme(name, rule, rounding), np.zeros((ROWS, WIDTH), np.float32))
        assert not one.back.any() and one.told["loss"] == one.told["plain_loss"] == 0


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 1), (1, 17), (3, 50), (64, 48), (1, 96)])
@pytest.mark.parametrize("name", [name for name in NAMES if not formats.get(name).fixed_group])
def test_one_row_or_one_column(name: str, rows: int, width: int) -> None:
    w = np.random.default_rng(2).normal(size=(rows, width)).astype(np.float32)
    for rule, rounding in METHODS:
        asked = scheme(name, rule, rounding, width)
        assert solved(asked, w).told["loss"] <= {2: 0.3, 3: 0.15}.get(formats.get(name).bits, 0.15 if name == BOOK else 0.05)


@pytest.mark.parametrize("adapter", ["int8_asym", "fp16"])
@pytest.mark.parametrize("power", [-12, 0, 20, 100])
def test_a_correction_helps_or_is_zeros(power: int, adapter: str) -> None:
    w, moments = np.ldexp(weights(), power), inputs()
    back = formats.quantize(formats.get("int2_sym"), w, 32).stored().dequantize()
    before = float(quadratic_loss(back - w, moments.hessian).sum() / quadratic_loss(w, moments.hessian).sum())
    found = correct(Scheme("int2_sym", 32, adapter_rank=4, adapter_format=adapter), w, back, moments)
    assert np.isfinite(found.product).all() and found.loss <= before * 1.000001
    assert found.helps == (adapter == "int8_asym" or power < 50) and (found.helps or not found.product.any())
    assert not found.helps or found.loss < 0.8 * before


@pytest.mark.parametrize("factor", [1e-30, 1e-7, 1e10, 1e30])
def test_the_quadratic_form_of_numbers_whose_squares_are_no_float32(factor: float) -> None:
    d, h = weights(), inputs().hessian
    for strength in (1e-30, 1.0, 1e30):
        near, far = (d * np.float32(factor)).astype(np.float64), (h * np.float32(strength)).astype(np.float64)
        wanted = np.einsum("ij,jk,ik->i", near, far, near)
        # Sums of 96 by 96 products in f32.
        np.testing.assert_allclose(quadratic_loss(d * np.float32(factor), h * np.float32(strength)), wanted, rtol=1e-5)


def test_factors_do_not_depend_on_what_all_weights_are_multiplied_by() -> None:
    moments, asked, free = inputs(), Scheme("int4_sym", 32), np.ones(WIDTH, bool)
    w = weights() * np.exp(np.random.default_rng(3).normal(size=WIDTH)).astype(np.float32)

    def chosen(power: int) -> tuple[np.ndarray, tuple[float, float]]:
        def by(one: np.ndarray, ts: list[np.ndarray]) -> list[np.ndarray]:
            return errors(asked, moments, one, ts)

        return choose_factors(WIDTH, [Reader(np.ldexp(w, power), moments.hessian, np.arange(WIDTH), 1, by)], free)  # type: ignore[arg-type]

    usual, pair = chosen(0)
    assert pair != (0.0, 0.0)
    for power in (20, 100):
        t, other = chosen(power)
        assert other == pair
        np.testing.assert_allclose(t, usual, rtol=1e-5)


@pytest.mark.parametrize("moments", [False, True])
def test_a_fitted_table_does_not_depend_on_what_all_weights_are_multiplied_by(moments: bool) -> None:
    w, asked = np.random.default_rng(4).gamma(2.0, size=(32, WIDTH)).astype(np.float32), Scheme(formats.ADAPTIVE, 32)
    h = inputs().diagonal if moments else None
    usual = fit_table(asked, [(w, h)])
    for power in (-100, -40, 40, 100):
        assert fit_table(asked, [(np.ldexp(w, power), h)]) == usual
