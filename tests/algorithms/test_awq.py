"""AWQ by its quadratic form: the loss is that of replayed activations, the choice is the best of the grid, and nothing odd breaks it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from llmcomp import formats
from llmcomp.algorithms.awq import GRID, PART, SECOND_ORDER_GRID, Reader, choose_factors, quadratic_loss
from tests.reference import awq as reference

ROWS, WIDTH, TOKENS, GROUP = 48, 128, 300, 64


def layer(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Heavy-tailed weights and correlated inputs, some channels far louder than others."""
    rng = np.random.default_rng(seed)
    loud = np.exp(rng.normal(size=WIDTH))
    w = rng.standard_t(5, (ROWS, WIDTH)) * 0.02 / loud**0.5
    x = (rng.normal(size=(TOKENS, 16)) @ rng.normal(size=(16, WIDTH)) + rng.normal(size=(TOKENS, WIDTH))) * loud
    return w.astype(np.float32), x.astype(np.float32)


def typical(magnitudes: np.ndarray) -> np.ndarray:
    """Power mean of order 1/4 of each column."""
    return np.asarray(np.mean(magnitudes**0.25, axis=0) ** 4)


def nearest(w: np.ndarray) -> np.ndarray:
    return formats.quantize(formats.get("int4_sym"), w, GROUP).dequantize()


def errors(w: np.ndarray, ts: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [nearest(w * t) / t - w for t in ts]


def reader(w: np.ndarray, x: np.ndarray, share: float = 1.0) -> Reader:
    return Reader(w, (x.T @ x / max(len(x), 1)).astype(np.float32), np.arange(WIDTH), share, errors, errors)


def test_the_quadratic_form_is_the_mean_squared_error_of_outputs() -> None:
    w, x = layer()
    d = nearest(w) - w
    wanted = np.square(x.astype(np.float64) @ d.T).sum(0) / len(x)
    np.testing.assert_allclose(quadratic_loss(d, (x.T @ x / len(x)).astype(np.float32)), wanted, rtol=1e-4)


def test_the_quadratic_form_of_many_columns() -> None:
    rng = np.random.default_rng(0)
    width = PART + 200
    x, d = rng.normal(size=(300, width)).astype(np.float32), rng.normal(size=(7, width)).astype(np.float32)
    wanted = np.square(x.astype(np.float64) @ d.T).sum(0) / len(x)
    np.testing.assert_allclose(quadratic_loss(d, x.T @ x / np.float32(len(x))), wanted, rtol=1e-4)


def test_the_choice_is_the_best_of_the_grid_by_replayed_activations() -> None:
    w, x = layer()
    t, chosen = choose_factors(WIDTH, [reader(w, x)], np.ones(WIDTH, bool))
    h, m = np.square(x, dtype=np.float64).mean(0), typical(np.abs(w).astype(np.float64))
    errors = {pair: reference.output_error(w, x, reference.factors(h, m, *pair), nearest) for pair in GRID}
    assert chosen == min(errors, key=errors.__getitem__)
    # f32 sums of H on one side.
    np.testing.assert_allclose(t, reference.factors(h, m, *chosen), rtol=1e-3)
    assert reference.output_error(w, x, t.astype(np.float64), nearest) < 0.9 * errors[GRID[0]]


def test_without_a_quick_quantizer_all_of_another_grid_is_tried() -> None:
    w, x = layer()
    one = replace(reader(w, x), quick_errors=None)
    _, chosen = choose_factors(WIDTH, [one], np.ones(WIDTH, bool), SECOND_ORDER_GRID)
    h, m = np.square(x, dtype=np.float64).mean(0), typical(np.abs(w).astype(np.float64))
    errors = {pair: reference.output_error(w, x, reference.factors(h, m, *pair), nearest) for pair in SECOND_ORDER_GRID}
    assert chosen == min(errors, key=errors.__getitem__)


def test_what_saves_too_little_leaves_the_weights_as_they_are() -> None:
    w, x = layer()
    h, m = np.square(x, dtype=np.float64).mean(0), typical(np.abs(w).astype(np.float64))
    errors = {pair: reference.output_error(w, x, reference.factors(h, m, *pair), nearest) for pair in GRID}
    saved = 1 - min(errors.values()) / errors[GRID[0]]
    for gain, kept in ((0.9 * saved, False), (1.1 * saved, True)):
        t, chosen = choose_factors(WIDTH, [replace(reader(w, x), quick_errors=None)], np.ones(WIDTH, bool), gain=gain)
        assert (chosen == GRID[0]) == kept == bool((t == 1).all())


def test_two_readers_share_one_choice() -> None:
    (w, x), (other, _) = layer(), layer(1)
    t, chosen = choose_factors(WIDTH, [reader(w, x), reader(other, x)], np.ones(WIDTH, bool))
    h = np.square(x, dtype=np.float64).mean(0)
    m = typical(np.abs(np.concatenate([w, other])).astype(np.float64))
    total = {p: sum(reference.output_error(v, x, reference.factors(h, m, *p), nearest) for v in (w, other)) for p in GRID}
    assert chosen == min(total, key=total.__getitem__)
    np.testing.assert_allclose(t, reference.factors(h, m, *chosen), rtol=1e-3)


def test_channels_that_are_not_free_or_dead_keep_one() -> None:
    w, x = layer()
    x[:, 3] = 0
    free = np.ones(WIDTH, bool)
    free[7] = False
    t, _ = choose_factors(WIDTH, [reader(w, x)], free)
    assert t[3] == t[7] == 1 and np.isfinite(t).all() and (t > 0).all()


@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_little_data_is_no_trouble(tokens: int) -> None:
    w, x = layer()
    x = np.repeat(x[:1], tokens, axis=0)
    t, _ = choose_factors(WIDTH, [reader(w, x)], np.ones(WIDTH, bool))
    assert np.isfinite(t).all() and (t > 0).all()
    if tokens:
        ones = np.ones(WIDTH)
        assert reference.output_error(w, x, t.astype(np.float64), nearest) <= reference.output_error(w, x, ones, nearest) * (1 + 1e-3)


def test_grouped_channels_take_one_factor_for_several_columns() -> None:
    w, x = layer()
    channels = np.arange(WIDTH) // 2
    one = Reader(w, (x.T @ x / len(x)).astype(np.float32), channels, 1.0, errors, errors)
    t, (alpha, beta) = choose_factors(WIDTH // 2, [one], np.ones(WIDTH // 2, bool))
    h = np.square(x, dtype=np.float64).mean(0).reshape(-1, 2).mean(1)
    m = typical(np.abs(w).astype(np.float64).reshape(ROWS, -1, 2).swapaxes(1, 2).reshape(-1, WIDTH // 2))
    np.testing.assert_allclose(t, reference.factors(h, m, alpha, beta), rtol=1e-3)
