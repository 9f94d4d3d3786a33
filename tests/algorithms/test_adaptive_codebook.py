from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from llmcomp.algorithms.adaptive_codebook import Table, adaptive_codebook
from llmcomp.algorithms.kmeans import Sums
from llmcomp.errors import OptionError
from llmcomp.formats.codebook import make_codebook
from tests.algorithms.hessians import hard, inputs, moments, weights
from tests.reference.kmeans import least_error


def check(table: Table, count: int = 16) -> None:
    levels = np.array(table.levels)
    assert len(levels) == count and (np.diff(levels) > 0).all()
    assert make_codebook(levels).table_type == "f8e4m3"
    assert table.error <= min(table.rivals.values())


def lopsided(rows: int = 64) -> np.ndarray:
    """Weights that no symmetric table suits."""
    rng = np.random.default_rng(5)
    return (np.exp(rng.normal(size=(rows, 128))) * rng.choice([-0.2, 1.0], (rows, 128)) * 0.01).astype(np.float32)


@pytest.mark.parametrize("count", [2, 4, 16])
def test_k_means_is_as_good_as_the_exact_one(count: int) -> None:
    rng = np.random.default_rng(0)
    x, weight = np.sort(rng.standard_t(4, 120)), rng.random(120) + 0.1
    sums = Sums(weight, x)
    centres = sums.settled(sums.split(count))
    error = float((weight * np.square(x[:, None] - centres).min(axis=1)).sum())
    assert error == pytest.approx(least_error(x, weight, count), rel=1e-6)


def test_stored_centres_are_the_given_ones_up_to_a_factor() -> None:
    rng = np.random.default_rng(0)
    x, mass = np.sort(rng.normal(size=4000)), np.ones(4000)
    centres = Sums(mass, x).settled(np.linspace(-2, 2, 16))
    stored = np.array(Sums(mass, x).stored(centres))
    np.testing.assert_array_equal(stored.astype(ml_dtypes.float8_e4m3fn).astype(np.float64), stored)
    factor = stored @ centres / (centres @ centres)
    # f8e4m3 has steps of 1/16 to 1/8 of a number, and centres next to zero do not matter.
    assert np.abs(stored / factor - centres).max() < 0.08 * np.abs(centres).max()


@pytest.mark.parametrize("case", hard())
def test_never_worse_than_the_tables_that_are_there(case: str) -> None:
    h = np.diagonal(moments(hard()[case])).copy()
    check(adaptive_codebook([(weights(64), h)], 64))


def test_a_fitted_table_pays_for_lopsided_weights() -> None:
    w, h = lopsided(), np.diagonal(moments(inputs())).copy()
    for importance in (None, h):
        table = adaptive_codebook([(w, importance)], 64)
        check(table)
        assert table.error < 0.8 * min(table.rivals.values())


def test_pooled() -> None:
    tensors = [(weights(64), None), (lopsided(), np.diagonal(moments(inputs())).copy())]
    pooled = adaptive_codebook(tensors, 64)
    check(pooled)
    alone = [adaptive_codebook([t], 64).error for t in tensors]
    assert pooled.error >= 0.999 * sum(alone)
    assert adaptive_codebook(tensors[:1], 64) == adaptive_codebook(tensors[:1], 64)


@pytest.mark.parametrize("count", [2, 5, 8, 32])
def test_other_numbers_of_levels(count: int) -> None:
    table = adaptive_codebook([(lopsided(), None)], 32, count)
    check(table, count)
    assert "cb4" not in table.rivals


def test_weights_of_few_values() -> None:
    shapes = {"zeros": np.zeros((8, 64)), "constant": np.full((8, 64), 0.3), "two": np.tile([-1.0, 2.0], (8, 32))}
    for w in shapes.values():
        table = adaptive_codebook([(w.astype(np.float32), None)], 64)
        check(table)
        assert np.isfinite(table.error)


def test_more_levels_are_better_and_limits_are_kept() -> None:
    errors = [adaptive_codebook([(lopsided(), None)], 64, n).error for n in (4, 8, 16, 32)]
    assert all(b < a for a, b in itertools.pairwise(errors))
    for count in (1, 33):
        with pytest.raises(OptionError):
            adaptive_codebook([(lopsided(), None)], 64, count)
