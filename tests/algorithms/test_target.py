"""What rounding aims at on the quantized path, against damped least squares over the tokens themselves."""

from __future__ import annotations

import numpy as np
import pytest

from llmcomp.algorithms.hessian import padding
from llmcomp.algorithms.target import corrected, factorized
from tests.algorithms.hessians import hard, inputs, moments, weights
from tests.reference.target import target

DAMPING = 0.1


def pull(w: np.ndarray, y: np.ndarray, given: np.ndarray) -> np.ndarray:
    return ((y - given @ w.T).T @ given / len(given)).astype(np.float32)


def aimed(w: np.ndarray, y: np.ndarray, given: np.ndarray, strength: float) -> np.ndarray:
    factor = factorized(moments(given), DAMPING)
    assert factor is not None
    return corrected(w, pull(w, y, given), factor, strength)


@pytest.mark.parametrize("residual", [False, True])
def test_it_is_the_damped_least_squares_solution(residual: bool) -> None:
    w, x = np.float64(weights()), inputs()
    rng = np.random.default_rng(4)
    given = x + 0.1 * x.std() * rng.normal(size=x.shape)
    # A residual that the quantized path has lost something of, which the layer's inputs know a part of.
    lost = given @ rng.normal(size=(x.shape[1], len(w))) * 1e-3 if residual else 0.0
    y = x @ w.T + lost
    extra = padding(moments(given), DAMPING)
    whole = target(w, y, given, extra)
    moved = np.abs(whole - w).max()
    assert moved > 1e-4
    # f32 second moments and solutions, of a condition number of some hundreds.
    np.testing.assert_allclose(aimed(weights(), y, given, 1.0), whole, atol=2e-3 * moved)
    np.testing.assert_allclose(aimed(weights(), y, given, 0.5), (w + whole) / 2, atol=2e-3 * moved)


def test_outputs_come_nearer_and_inputs_that_are_what_they_were_change_nothing() -> None:
    w, x = weights(), inputs()
    given = x + 0.1 * x.std() * np.random.default_rng(4).normal(size=x.shape)
    y = x @ w.T
    before, after = (np.square(y - given @ one.T).mean() for one in (w, aimed(w, y, given, 0.5)))
    assert after < 0.95 * before
    np.testing.assert_array_equal(aimed(w, x @ np.float64(w).T, x, 0.0), w)
    np.testing.assert_allclose(aimed(w, x @ np.float64(w).T, x, 1.0), w, atol=1e-6)


@pytest.mark.parametrize("kind", hard())
def test_inputs_that_break_second_order_methods_give_finite_targets(kind: str) -> None:
    w, x = weights(), hard()[kind]
    given = x * 0.9
    found = aimed(w, x @ w.T, given, 0.5)
    assert np.isfinite(found).all()
    dead = ~given.any(axis=0)
    np.testing.assert_array_equal(found[:, dead], w[:, dead])


def test_moments_that_cannot_be_factorized_are_told() -> None:
    assert factorized(np.array([[1, 5], [5, 1]], np.float32), 0.1) is None


def test_rows_of_zeros_stay() -> None:
    w, x = weights().copy(), inputs()
    w[2] = 0
    given = x + 0.1 * x.std() * np.random.default_rng(4).normal(size=x.shape)
    found = aimed(w, x @ w.T + given[:, :1], given, 0.5)
    assert not found[2].any() and (found[[0, 1]] != w[[0, 1]]).any(1).all()
