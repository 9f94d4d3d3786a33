"""The decomposition in panels: it is that of the matrix, whatever the width and on however many threads, and tells what has none."""

from __future__ import annotations

import numpy as np
import pytest

from llmcomp.algorithms.cholesky import PANEL, UnitUpper, decompose
from llmcomp.threads import Threads
from tests.algorithms.hessians import inputs, moments


def whole(unit: UnitUpper, width: int) -> np.ndarray:
    return unit.columns(0, width).T.astype(np.float64)


@pytest.mark.parametrize("width", [1, 96, PANEL, PANEL + 1, 2 * PANEL + 76])
def test_the_product_is_the_matrix_in_its_order(width: int) -> None:
    h = moments(inputs(width, width + 100))
    order, extra = np.random.default_rng(0).permutation(width), np.linspace(0.1, 1, width)
    found = decompose(h, order, extra)
    assert found is not None
    r, pivots = whole(found[0], width), found[1]
    np.testing.assert_array_equal(r, np.triu(r))
    np.testing.assert_array_equal(np.diagonal(r), 1)
    assert (pivots > 0).all()
    want = h[order][:, order] + np.diag(extra)
    scale = np.sqrt(np.outer(np.diagonal(want), np.diagonal(want)))
    np.testing.assert_allclose((r * pivots) @ r.T / scale, want / scale, atol=2e-6)


def test_threads_change_nothing() -> None:
    width = 2 * PANEL + 76
    h, order, extra = moments(inputs(width)), np.arange(width), np.ones(width)
    with Threads(1):
        alone = decompose(h, order, extra)
    with Threads(3) as threads:
        together = decompose(h, order, extra, threads.map)
    assert alone is not None and together is not None
    # BLAS has a thread more here and there.
    np.testing.assert_allclose(whole(together[0], width), whole(alone[0], width), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(together[1], alone[1], rtol=1e-6)


@pytest.mark.parametrize("place", [3, PANEL + 3])
@pytest.mark.parametrize("bad", [-1e3, np.nan])
def test_what_is_not_positive_definite_has_none(place: int, bad: float) -> None:
    h = moments(inputs(PANEL + 40))
    h[place, place] = bad
    assert decompose(h, np.arange(len(h)), np.ones(len(h))) is None


def test_columns_are_the_same_across_panels() -> None:
    width = 2 * PANEL + 76
    found = decompose(moments(inputs(width)), np.arange(width), np.ones(width))
    assert found is not None
    r = found[0].columns(0, width).T
    for start, stop in ((0, 64), (PANEL - 40, PANEL + 40), (PANEL, 2 * PANEL), (100, 2 * PANEL + 20), (width - 1, width)):
        np.testing.assert_array_equal(found[0].columns(start, stop), r[:stop, start:stop].T)
