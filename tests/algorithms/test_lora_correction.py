from __future__ import annotations

import numpy as np
import pytest

from llmcomp.algorithms.lora_correction import lora_correction
from llmcomp.errors import OptionError
from tests.algorithms.hessians import hard, inputs, moments
from tests.reference.gptq import loss
from tests.reference.lora_correction import correction


def pair(rows: int, width: int = 128) -> tuple[np.ndarray, np.ndarray]:
    """A weight and what rounding has made of it."""
    rng = np.random.default_rng(3)
    w = (rng.standard_t(5, (rows, width)) * 0.02).astype(np.float32)
    return w, (np.rint(w / 0.02) * 0.02).astype(np.float32)


@pytest.mark.parametrize("rows", [40, 300])
@pytest.mark.parametrize("diagonal", [False, True])
def test_the_formula(rows: int, diagonal: bool) -> None:
    (w, rounded), h = pair(rows), moments(inputs())
    known = np.diagonal(h).copy() if diagonal else h
    a, b = lora_correction(w, rounded, known, 8)
    assert a.shape == (8, 128) and b.shape == (rows, 8) and a.dtype == b.dtype == np.float32
    np.testing.assert_allclose(b @ a, correction(w - rounded, np.diag(known) if diagonal else h, 8), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=0), rtol=1e-5)


@pytest.mark.parametrize("rows", [40, 300])
@pytest.mark.parametrize("case", hard())
def test_no_row_gets_worse_and_a_higher_rank_is_better(rows: int, case: str) -> None:
    (w, rounded), h = pair(rows), moments(hard()[case])
    least = loss(w, rounded, h)
    for rank in (1, 4, 32, 400):
        a, b = lora_correction(w, rounded, h, rank)
        assert np.isfinite(a).all() and np.isfinite(b).all()
        now = loss(w, rounded + np.float64(b) @ np.float64(a), h)
        # A, B and H are f32, so H has negative directions too: what is left is this much of what could be.
        assert (now <= least * (1 + 1e-5) + 1e-8 * np.square(w - rounded).sum(axis=1) * np.trace(h)).all()
        least = now
    assert least.sum() <= 1e-8 * np.square(w - rounded).sum() * np.trace(h)


def test_correlations_matter() -> None:
    (w, rounded), h = pair(300), moments(inputs())
    exact, approximate, blind = (
        loss(w, rounded + b @ a, h).sum()
        for a, b in (lora_correction(w, rounded, m, 8) for m in (h, np.diagonal(h).copy(), np.ones(128, np.float32)))
    )
    assert exact < approximate < blind


def test_a_rank_of_none() -> None:
    with pytest.raises(OptionError):
        lora_correction(*pair(4), np.ones(128), 0)
