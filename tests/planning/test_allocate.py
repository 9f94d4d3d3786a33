"""The knapsack: against every choice tried, its bound, its limits, its table."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import numpy as np
import pytest

from llmcomp.planning.allocate import allocate, frontier
from tests.reference.allocate import least_cost

Numbers = list[list[float]]


def small(seed: int) -> tuple[Numbers, Numbers]:
    """Up to five units of up to five options, with ties and with options of no use."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 6, rng.integers(1, 6))
    return [rng.integers(0, 30, k).tolist() for k in sizes], [(rng.integers(0, 20, k) / 8).tolist() for k in sizes]


def large(units: int, seed: int = 0) -> tuple[Numbers, Numbers]:
    """Bytes and losses as those of a model's layers: a few shapes, six formats, sensitivities over two orders of magnitude."""
    rng = np.random.default_rng(seed)
    weights, costs = [], []
    for i in range(units):
        rows, width = [(576, 576), (192, 576), (1536, 576), (576, 1536)][i % 4]
        loss = float(np.exp(rng.normal(0, 1.2))) * 1e-3
        weights.append(
            [float(rows * width * bits // 8 + rows * more) for bits, more in ((4, 9), (4, 18), (4, 36), (4, 23), (4, 45), (8, 3))]
        )
        costs.append([loss * share * float(np.exp(rng.normal(0, 0.05))) for share in (1.15, 1, 0.85, 0.9, 0.75, 0.006)])
    return weights, costs


@pytest.mark.parametrize("seed", range(60))
def test_as_good_as_every_choice_tried(seed: int) -> None:
    weights, costs = small(seed)
    for one, other, capacities in ((weights, costs, (0, 5, 20, 40, 60, 100)), (costs, weights, (0, 0.5, 2, 5, 10))):
        for capacity in capacities:
            true = least_cost(one, other, capacity)
            if true is None:
                with pytest.raises(ValueError, match="lightest"):
                    allocate(one, other, capacity)
                continue
            found = allocate(one, other, capacity)
            # The numbers are eighths, so their sums are exact, and so is the answer.
            assert found.proven and found.cost == true and found.weight <= capacity
            assert found.cost == sum(c[k] for c, k in zip(other, found.choice, strict=True))
            assert found.weight == sum(w[k] for w, k in zip(one, found.choice, strict=True))
            assert found.bound <= found.cost + 1e-12 and found.gap == 0


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.95])
def test_a_model_of_two_hundred_layers_is_solved_to_the_end(share: float) -> None:
    weights, costs = large(200)
    least, most = sum(map(min, weights)), sum(map(max, weights))
    capacity = least + share * (most - least)
    found = allocate(weights, costs, capacity)
    # One hull step of one layer is at most 0.8 % of the range.
    assert found.proven and capacity * 0.995 < found.weight <= capacity
    assert found.bound <= found.cost < found.bound * 1.02
    back = allocate(costs, weights, found.cost)
    assert back.proven and back.weight <= found.cost * (1 + 1e-12) and back.cost <= found.weight


def test_too_many_states_are_owned_up_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcomp.planning.allocate.STATES", 2)
    weights, costs = large(40)
    capacity = 0.7 * sum(map(max, weights))
    found = allocate(weights, costs, capacity)
    assert not found.proven and found.weight <= capacity and found.gap == found.cost - found.bound > 0


def test_all_fits_and_nothing_does() -> None:
    assert allocate([[1, 2], [1, 3]], [[1, 0], [5, 0]], 5).choice == (1, 1)
    assert allocate([[1, 2], [1, 3]], [[1, 0], [5, 0]], inf).cost == 0
    assert allocate([], [], 0).choice == ()
    with pytest.raises(ValueError, match="weigh 2, more than 1"):
        allocate([[1, 2], [1, 3]], [[1, 0], [5, 0]], 1)


def test_the_table_goes_from_the_lightest_to_the_best_and_each_point_is_on_the_hull() -> None:
    weights, costs = large(50)
    points = frontier(weights, costs, 9)
    total = [tuple(sum(v[k] for v, k in zip(values, choice, strict=True)) for values in (weights, costs)) for choice in points]
    assert len(points) <= 9 and total[0][0] == sum(map(min, weights)) and total[-1][1] == pytest.approx(sum(map(min, costs)))
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(total)]
    assert slopes == sorted(slopes) and max(slopes) < 0
    for weight, cost in total:
        assert allocate(weights, costs, weight).cost == pytest.approx(cost, rel=1e-12)
