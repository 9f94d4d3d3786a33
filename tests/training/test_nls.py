"""Ranks without torch: draws, what they cost, and the search."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest

from llmcomp.errors import OptionError
from llmcomp.training.nls import SANDWICH, Config, Judge, Space, check_ranks, search

SPACE = Space((8, 4, 2, 1), (64, 80, 64, 128, 80))


def needs(seed: int) -> np.ndarray:
    """[layers]: how much a layer suffers from ranks that it lacks; one or two suffer most."""
    return np.random.default_rng(seed).exponential(1.0, 5) ** 3


def loss(seed: int) -> Judge:
    """Convex in each rank, and the need of one layer hides in another's: what single layers say is not all."""
    need = needs(seed)

    def judge(config: Config) -> float:
        each = need / (1.0 + np.array(config))
        return float(each.sum() + 0.1 * each[0] * each[1])

    return judge


def test_draws_are_functions_of_seed_and_step() -> None:
    drawn = [SPACE.draw(3, step) for step in range(40)]
    assert drawn == [SPACE.draw(3, step) for step in range(40)]
    assert drawn != [SPACE.draw(4, step) for step in range(40)]
    assert [step for step, config in enumerate(drawn) if config == SPACE.uniform(8)] == list(range(0, 40, SANDWICH))


def test_draws_are_spread_over_all_ranks_and_layers_apart() -> None:
    steps = [step for step in range(4000) if step % SANDWICH]
    drawn = np.array([SPACE.draw(0, step) for step in steps])
    for layer in range(5):
        counts = Counter(drawn[:, layer].tolist())
        # Five standard deviations of a fair draw of 3000.
        assert all(abs(counts[rank] - 750) < 5 * (3000 * 0.25 * 0.75) ** 0.5 for rank in SPACE.ranks)
    # Of independent draws, likewise.
    assert np.abs(np.corrcoef(drawn.T) - np.eye(5)).max() < 5 / 3000**0.5


def test_the_cost_is_that_of_rows_and_columns() -> None:
    assert SPACE.cost((8, 4, 2, 1, 1)) == 8 * 64 + 4 * 80 + 2 * 64 + 128 + 80
    assert SPACE.middle == (2,) * 5
    assert Space((32, 24, 16, 8), (1, 1)).middle == (16, 16) and Space((3, 2, 1), (1,)).middle == (2,)
    assert SPACE.start(None) == (SPACE.middle, 2 * 416)
    assert SPACE.start(10**9) == (SPACE.middle, 10**9)
    assert SPACE.start(831) == (SPACE.uniform(1), 831)
    with pytest.raises(OptionError, match=r"--rank-budget 415: rank 1 everywhere has 416 parameters"):
        SPACE.start(415)


@pytest.mark.parametrize("given", [(8,), (8, 8), (8, -1), ()])
def test_ranks_that_are_no_choice_are_refused(given: Config) -> None:
    with pytest.raises(OptionError, match="two or more, all different"):
        check_ranks(given)
    assert check_ranks((4, 16, 0)) == (16, 4, 0)


@pytest.mark.parametrize("budget", [None, 1300])
@pytest.mark.parametrize("seed", range(6))
def test_it_finds_almost_the_best_of_all(seed: int, budget: int | None) -> None:
    """64 of 1024 configurations are looked at."""
    asked: list[Config] = []
    judge = loss(seed)

    def noted(config: Config) -> float:
        asked.append(config)
        return judge(config)

    found = search(SPACE, budget, noted, 64, seed)
    most = budget or SPACE.cost(SPACE.middle)
    fitting = sorted(judge(c) for c in product(SPACE.ranks, repeat=5) if SPACE.cost(c) <= most)
    assert SPACE.cost(found.config) <= most and judge(found.config) == found.loss
    assert len(asked) == len(set(asked)) == found.evaluations <= 64
    assert found.start_loss == judge(SPACE.middle)
    assert found.loss <= fitting[3]
    assert search(SPACE, budget, judge, 64, seed) == found


@pytest.mark.parametrize("evaluations", [1, 2, 3, 5, 12])
def test_few_evaluations_are_kept_to(evaluations: int) -> None:
    """210 layers, as a model of 30 blocks has."""
    space = Space((32, 24, 16, 8), (1000,) * 210)
    need = np.zeros(210)
    need[:30] = 1.0
    found = search(space, None, lambda c: float((need / np.array(c)).sum()), evaluations, 0)
    assert found.evaluations == evaluations and found.loss <= found.start_loss
    assert space.cost(found.config) <= space.cost(space.middle)
    # Three bunches, each asked twice, and what they say: the front needs more.
    assert (found.loss < found.start_loss) == (evaluations == 12)
