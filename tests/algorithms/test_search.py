"""Scale search: never worse than plain rounding by its own measure, as good as trying everything by hand, and obedient to importance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmcomp import formats, kernels
from llmcomp.algorithms.search import scale_estimation, search
from llmcomp.formats import NUMPY, CompressedWeight
from tests.reference.search import least_error

NAMES = formats.names()


def weights(seed: int = 0, rows: int = 64, width: int = 512) -> np.ndarray:
    """Heavy tails, a group of zeros and one of a single value."""
    rng = np.random.default_rng(seed)
    w = (rng.standard_t(4, (rows, width)) * 0.02).astype(np.float32)
    w[0, :64] = 0
    w[1, :128] = 0.03
    return w


def searched(fmt: formats.Format, w: np.ndarray, importance: np.ndarray | None = None) -> CompressedWeight:
    grouped = formats.grouped_shape(w.shape, fmt.group_size)
    size = grouped[-1]
    ranges: Any = search(NUMPY, fmt, w.reshape(len(w), -1, size), None if importance is None else importance.reshape(1, -1, size))
    per_group = (*grouped[:-1], 1)
    given = {name: value.reshape(per_group) for name, value in ranges.items()}
    return formats.quantize(fmt, w, fmt.group_size, "search", **given)


def weighted(fmt: formats.Format, w: np.ndarray, back: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
    """Weighted squared error of each group."""
    errors = np.abs(w.astype(np.float64)) ** fmt.search_power * (w.astype(np.float64) - back) ** 2
    errors = errors if importance is None else errors * importance
    return errors.reshape(len(w), -1, formats.grouped_shape(w.shape, fmt.group_size)[-1]).sum(-1)


@pytest.mark.parametrize("name", NAMES)
def test_no_group_is_worse_than_with_minmax(name: str) -> None:
    fmt, w = formats.get(name), weights()
    plain = weighted(fmt, w, formats.quantize(fmt, w, fmt.group_size).stored().dequantize())
    best = weighted(fmt, w, searched(fmt, w).stored().dequantize())
    if name == "nvfp4":
        # minmax rounds its E4M3 scales against another second-order scale, so single groups can be luckier.
        assert best.sum() < plain.sum()
    else:
        # The choice is made in f32 and before the scale is rounded to f16, which moves a level by up to 8 / 4096 of a step.
        assert (best <= plain * (1 + 5e-3) + 1e-15).all()
    assert best.sum() < plain.sum() or name.startswith("mxfp8")


@pytest.mark.parametrize("name", ["int4_sym", "int4_asym", "int3_sym", "nf4", "cb4", "fp4", "mxfp4"])
def test_as_good_as_every_candidate_tried_by_hand(name: str) -> None:
    fmt, w = formats.get(name), weights(1, 4, 128)
    found = weighted(fmt, w, searched(fmt, w).stored().dequantize())
    # The scale is rounded to f16 after the choice: levels move by up to 8 / 4096 of a step, and what was exact is off by 1e-9.
    np.testing.assert_allclose(found, least_error(fmt, w), rtol=5e-3, atol=1e-9)


@pytest.mark.parametrize("name", ["int4_sym", "int4_asym", "nf4", "nvfp4"])
def test_importance_moves_the_error_away_from_what_matters(name: str) -> None:
    fmt, w = formats.get(name), weights(2)
    importance = np.ones(w.shape[1], np.float32)
    importance[::8] = 50
    plain, cared = searched(fmt, w).stored().dequantize(), searched(fmt, w, importance).stored().dequantize()
    assert np.square(w - cared)[:, ::8].sum() < np.square(w - plain)[:, ::8].sum()
    assert weighted(fmt, w, cared, importance).sum() <= weighted(fmt, w, plain, importance).sum()


@pytest.mark.parametrize("name", NAMES)
def test_the_compiled_search_is_as_good_as_numpy(name: str) -> None:
    fmt, w = formats.get(name), weights(3)
    tile = kernels.quantize_rows(fmt, w, fmt.group_size, search)
    oracle = searched(fmt, w)
    # Sums differ in their last bits, so of two nearly equal candidates either may win, and a refitted scale may round to the next f16.
    assert (tile.scale != oracle.scale).mean() < 0.05
    back = formats.quantize(
        fmt,
        w,
        fmt.group_size,
        "search",
        tile.scale,
        None if tile.zero_point is None else formats.unpack(tile.zero_point, str(fmt.zero_point_type), tile.scale.shape),
    )
    np.testing.assert_array_equal(back.packed()["codes"], tile.codes)
    np.testing.assert_allclose(
        weighted(fmt, w, back.stored().dequantize()).sum(), weighted(fmt, w, oracle.stored().dequantize()).sum(), rtol=1e-4
    )


def test_a_searched_nvfp4_scale_is_stored_without_another_rounding() -> None:
    fmt = formats.get("nvfp4")
    weight = searched(fmt, weights(4))
    stored = fmt.load_scale(weight.stored_scale())
    # Groups of zeros have a scale below what E4M3 holds beside the largest.
    live = weight.scale > weight.scale.max() * 2.0**-14
    assert live.mean() > 0.99
    np.testing.assert_array_equal(stored[live], weight.scale[live])


@pytest.mark.parametrize("name", NAMES)
def test_the_even_search_has_less_error_where_magnitudes_do_not_count(name: str) -> None:
    fmt, w = formats.get(name), weights(5)
    size = formats.grouped_shape(w.shape, fmt.group_size)[-1]
    importance = np.exp(np.random.default_rng(6).normal(size=w.shape[1])).astype(np.float32).reshape(1, -1, size)
    grouped, errors = w.reshape(len(w), -1, size), []
    for rule in (scale_estimation, search):
        ranges: Any = rule(NUMPY, fmt, grouped, importance)
        back = fmt.decode(NUMPY, fmt.encode(NUMPY, grouped, **ranges), **ranges)
        errors.append(float((np.square(grouped - back) * importance).sum(dtype=np.float64)))
    # Refits depend on the weighting, so a single group may be luckier with another.
    assert errors[0] < errors[1] or ((fmt.bits == 8 or name.startswith("mx")) and errors[0] < 1.02 * errors[1])
    tile = kernels.quantize_rows(fmt, w, fmt.group_size, scale_estimation, kernels.Given(importance=importance.reshape(-1)))
    assert (tile.scale.reshape(-1) != ranges_of(fmt, grouped, importance)).mean() < 0.05


def ranges_of(fmt: formats.Format, grouped: np.ndarray, importance: np.ndarray) -> np.ndarray:
    found: Any = scale_estimation(NUMPY, fmt, grouped, importance)
    return found["scale"].reshape(-1)
