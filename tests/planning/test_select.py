from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from llmcomp.planning.select import BINS, nearest_subset


@pytest.mark.parametrize("seed", range(12))
def test_it_is_the_best_of_all_subsets(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes, costs = rng.integers(1, 9, 9).tolist(), rng.random(9).tolist()
    ratio, total = float(rng.random()), sum(sizes)
    every = [c for n in range(10) for c in combinations(range(9), n)]
    nearest = min(abs(sum(sizes[i] for i in c) - ratio * total) for c in every)
    found = nearest_subset(sizes, costs, ratio)
    reached = sum(sizes[i] for i in found)
    assert abs(reached - ratio * total) == pytest.approx(nearest)
    same = [sum(costs[i] for i in c) for c in every if sum(sizes[i] for i in c) == reached]
    assert sum(costs[i] for i in found) == pytest.approx(min(same))


def test_two_equal_layers_and_a_half() -> None:
    """NNCF compresses neither."""
    assert nearest_subset([100, 100], [2.0, 1.0], 0.5) == [1]


def test_one_large_layer_does_not_block_the_others() -> None:
    assert nearest_subset([10, 1000, 10, 10], [0.0, 1.0, 2.0, 3.0], 30 / 1030) == [0, 2, 3]


def test_ends_and_many_sizes() -> None:
    assert nearest_subset([3, 4], [1.0, 1.0], 0.0) == [] and nearest_subset([3, 4], [1.0, 1.0], 1.0) == [0, 1]
    assert nearest_subset([], [], 0.5) == []
    rng = np.random.default_rng(0)
    sizes = rng.integers(1 << 20, 1 << 27, 300).tolist()
    found = nearest_subset(sizes, rng.random(300).tolist(), 0.7)
    # Sizes are rounded to whole bins, their totals are not.
    assert abs(sum(sizes[i] for i in found) / sum(sizes) - 0.7) <= 4 / BINS


def test_layers_not_much_larger_than_a_bin() -> None:
    """Were totals those of the rounded sizes, the share would be 2 % off."""
    sizes = [2, 3, 4] * 3000
    found = nearest_subset(sizes, [float(i % 97) for i in range(9000)], 0.7)
    assert abs(sum(sizes[i] for i in found) / sum(sizes) - 0.7) <= 4 / BINS
