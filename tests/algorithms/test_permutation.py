"""The order of columns against its definition in float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from llmcomp.algorithms.permutation import falling_order


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_columns_fall_by_mean_magnitude_over_all_tiles(dtype: type) -> None:
    rng = np.random.default_rng(0)
    w = (rng.normal(size=(40, 32)) * rng.uniform(0.1, 3, 32)).astype(dtype)
    means = np.abs(w.astype(np.float64)).mean(axis=0)
    np.testing.assert_array_equal(falling_order([w[:7], w[7:]]), np.argsort(-means))


def test_equal_columns_stay_as_they_are() -> None:
    w = np.array([[1.0, -2.0, 0.0, 2.0, 1.0, 0.0]], np.float32)
    assert falling_order([w]).tolist() == [1, 3, 0, 4, 2, 5]
