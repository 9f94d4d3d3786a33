"""Columns rounded by compiled kernels against numpy, in every format."""

from __future__ import annotations

import numpy as np
import pytest

from llmcomp import formats, kernels
from llmcomp.algorithms.columns import round_columns, runs
from llmcomp.formats import NUMPY

NAMES = [name for name in formats.names() if kernels.has_columns(formats.get(name))]


@pytest.mark.parametrize("candidates", [0, 3])
@pytest.mark.parametrize(("count", "rows"), [(7, 5), (16, 64), (64, 70)])
@pytest.mark.parametrize("name", NAMES)
def test_codes_are_numpys(name: str, count: int, rows: int, candidates: int) -> None:
    fmt, rng = formats.get(name), np.random.default_rng(0)
    tail = (candidates, rows) if candidates else (rows,)
    base = rng.normal(size=(count, rows)).astype(np.float32)
    state = (0.1 * rng.normal(size=(count, *tail))).astype(np.float32)
    gain = rng.uniform(0.5, 1, count).astype(np.float32)
    coupling = (0.05 * rng.normal(size=(count, count))).astype(np.float32)
    ranges = fmt.ranges(NUMPY, np.ascontiguousarray(base.T))
    grid = {k: np.ascontiguousarray(np.broadcast_to(v[:, 0], (candidates or count, rows)), np.float32) for k, v in ranges.items()}
    codes, moved, left = round_columns(fmt, base, state, gain, coupling, grid)
    found_codes, found_moved, found_left = kernels.round_columns(fmt, base, state, gain, coupling, grid)
    # A product and a sum round once together there, so that of a thousand codes one may be on the other side of a threshold.
    same = found_codes == codes
    assert same.mean() >= 0.999 and found_codes.dtype == codes.dtype
    np.testing.assert_allclose(found_moved[same], moved[same], atol=1e-5)
    np.testing.assert_allclose(found_left[same], left[same], atol=1e-5)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 64, 100, 1000])
def test_runs_cover_all_columns_and_fit_the_kernels(count: int) -> None:
    found = list(runs(count))
    assert [i for part in found for i in range(part.start, part.stop)] == list(range(count))
    assert all((part.stop - part.start) % 16 == 0 or part.stop - part.start < 16 for part in found)
