"""Factors for channels, against a float64 twin."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from llmcomp.algorithms.equalize import LIMIT, channel_factors, magnitudes
from tests.reference.equalize import factors


def readers(seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Two weights over six channels; the second reads each channel twice."""
    rng = np.random.default_rng(seed)
    scales = np.array([1.0, 10.0, 0.1, 3.0, 0.5, 2.0])
    return [
        ((rng.normal(size=(40, 6)) * scales).astype(np.float32), np.arange(6)),
        ((rng.normal(size=(30, 12)) * np.repeat(scales, 2)).astype(np.float32), np.repeat(np.arange(6), 2)),
    ]


def ours(weights: list[tuple[np.ndarray, np.ndarray]], free: np.ndarray) -> np.ndarray:
    return channel_factors(len(free), [(*magnitudes([w[:7], w[7:]]), labels) for w, labels in weights], free)


def test_factors_are_those_of_the_textbook() -> None:
    free = np.ones(6, bool)
    # Sums of f32 fourth roots against float64.
    np.testing.assert_allclose(ours(readers(), free), factors(readers(), free), rtol=1e-5)


def test_columns_are_alike_afterwards() -> None:
    (w, labels), _ = readers()
    t = ours([(w, labels)], np.ones(6, bool))
    typical, _ = magnitudes([w * t])
    np.testing.assert_allclose(typical, typical.mean(), rtol=1e-5)


def test_the_typical_factor_is_one_and_a_channel_that_is_not_free_keeps_one() -> None:
    free = np.array([True, True, False, True, True, True])
    t = ours(readers(), free)
    assert t[2] == 1
    assert np.log(t[free]).mean() == pytest.approx(0, abs=1e-6)


def test_a_channel_without_weight_and_one_of_extreme_weight() -> None:
    (w, labels), _ = readers()
    w[:, 1] = 0
    w[:, 3] *= np.float32(1e12)
    t = ours([(w, labels)], np.ones(6, bool))
    assert t[1] == 1 and np.isfinite(t).all()
    assert t[3] == pytest.approx(1 / LIMIT) and t.max() <= LIMIT * 1.0001


def test_zeros_are_no_small_weights() -> None:
    """A third of a column pruned, or the column of one of the heads that share a channel: what is left is as large as before."""
    (w, labels), _ = readers()
    usual = ours([(w, labels)], np.ones(6, bool))
    pruned = np.concatenate([w, np.where(np.arange(6) == 2, 0, w)]).astype(np.float32)
    np.testing.assert_allclose(ours([(pruned, labels)], np.ones(6, bool)), usual, rtol=1e-5)
    heads = np.hstack([w, np.where(np.arange(6) == 2, 0, w)]).astype(np.float32)
    np.testing.assert_allclose(ours([(heads, np.tile(labels, 2))], np.ones(6, bool)), usual, rtol=1e-5)


def test_any_float_type() -> None:
    w, labels = readers()[0]
    narrow = w.astype(ml_dtypes.bfloat16)
    free = np.ones(6, bool)
    np.testing.assert_array_equal(ours([(narrow, labels)], free), ours([(narrow.astype(np.float32), labels)], free))


@pytest.mark.filterwarnings("error")
def test_a_column_that_is_not_finite_keeps_one() -> None:
    """Its layer is refused later, by name; until then nothing is said."""
    (w, labels), _ = readers()
    w[0, 2], w[1, 3] = np.inf, np.nan
    t = ours([(w, labels)], np.ones(6, bool))
    assert np.isfinite(t).all() and t[2] == t[3] == 1
