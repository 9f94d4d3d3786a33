"""Neural low-rank adapter search without torch: ranks that are drawn in training, what they cost, and the search for the best within a budget.

One super-adapter holds all candidates: a layer of rank r uses its leading r. Sources: Munoz, Yuan, Jain, "Shears: Unstructured Sparsity with Neural
Low-rank Adapter Search", section 3 (weight sharing, the heuristic in the middle, hill climbing from it); "SQFT", section 3, for rounded weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from llmcomp.errors import OptionError

Config = tuple[int, ...]
"""The rank of each layer, in the model's order."""
Judge = Callable[[Config], float]
"""Held-out loss; lower is better."""
SANDWICH = 4
"""Every so many steps all layers have their largest rank, so that the last ranks, which few draws reach, are trained too (the sandwich rule of Yu and
Huang, "Universally Slimmable Networks", section 3). What it is worth is in evaluation/LOG.md."""
SCREENED = 0.6
"""Of the evaluations, at most, that find out which layers need their ranks; hill climbing has the rest."""
TRIES = 100
"""Proposals in a row that are known already after which hill climbing ends."""


@dataclass(frozen=True)
class Space:
    """The candidates."""

    ranks: Config
    """That a layer can have, descending."""
    costs: tuple[int, ...]
    """Parameters of one rank, of each layer: its rows and columns."""

    def uniform(self, rank: int) -> Config:
        return (rank,) * len(self.costs)

    @property
    def middle(self) -> Config:
        """The heuristic: the middle of the ranks for all layers, of two in the middle the smaller."""
        return self.uniform(self.ranks[len(self.ranks) // 2])

    def cost(self, config: Config) -> int:
        """Parameters."""
        return sum(rank * each for rank, each in zip(config, self.costs, strict=True))

    def start(self, budget: int | None) -> tuple[Config, int]:
        """(where the search begins, budget): the middle, and its cost where no budget is given; where it costs too much, the largest same rank that fits.

        Raises:
            OptionError: a budget below the cost of the smallest ranks.
        """
        if budget is None:
            return self.middle, self.cost(self.middle)
        fitting = [c for c in map(self.uniform, self.ranks) if self.cost(c) <= min(budget, self.cost(self.middle))]
        if not fitting:
            least = self.cost(self.uniform(self.ranks[-1]))
            raise OptionError(
                f"--rank-budget {budget}", f"rank {self.ranks[-1]} everywhere has {least} parameters", f"Give at least {least}"
            )
        return fitting[0], budget

    def draw(self, seed: int, step: int) -> Config:
        """The ranks of a step, a function of both: each layer's evenly out of all, or the largest everywhere."""
        if step % SANDWICH == 0:
            return self.uniform(self.ranks[0])
        drawn = np.random.default_rng([seed, step, 1]).integers(0, len(self.ranks), len(self.costs))
        return tuple(self.ranks[i] for i in drawn)


def check_ranks(ranks: Sequence[int]) -> Config:
    """The ranks, descending.

    Raises:
        OptionError: less than two different ones, or one below zero.
    """
    found = tuple(sorted(set(ranks), reverse=True))
    if len(found) < 2 or len(found) != len(ranks) or found[-1] < 0:
        raise OptionError(
            f"--ranks {','.join(map(str, ranks))}", "a search needs two or more, all different, none below 0", "Give such as 32,24,16,8"
        )
    return found


@dataclass(frozen=True)
class Found:
    """What a search found."""

    config: Config
    loss: float
    start_loss: float
    evaluations: int


class _Judged:
    """Losses that are known; each configuration is evaluated once, and no more of them than allowed."""

    def __init__(self, judge: Judge, evaluations: int) -> None:
        self.judge, self.left = judge, evaluations
        self.losses: dict[Config, float] = {}

    def __call__(self, config: Config) -> float:
        if config not in self.losses:
            self.losses[config] = self.judge(config)
            self.left -= 1
        return self.losses[config]


def search(space: Space, budget: int | None, judge: Judge, evaluations: int, seed: int) -> Found:
    """The configuration of the lowest loss among those that were evaluated, at most `evaluations`, and cost at most `budget`.

    1. The start (`Space.start`). 2. Layers, or bunches of neighbours where evaluations are few, get the smallest and the largest rank, one at a time:
    what the loss says is taken as the sum of what each layer gains, and ranks are dealt out by gain for each parameter. 3. Hill climbing from the better of
    both: a few random layers rise by one rank, others fall until it fits; what is better is kept.

    Raises:
        OptionError: as `Space.start`.
    """
    start, budget = space.start(budget)
    judged = _Judged(judge, evaluations)
    start_loss = best_loss = judged(start)
    best = start
    dealt = _deal(space, budget, start, judged, int(SCREENED * evaluations))
    if dealt is not None and judged.left > 0 and judged(dealt) < best_loss:
        best, best_loss = dealt, judged(dealt)
    rng, known = np.random.default_rng(seed), 0
    while judged.left > 0 and known < TRIES:
        proposed = _neighbour(space, budget, best, rng)
        known = known + 1 if proposed in judged.losses else 0
        if judged(proposed) < best_loss:
            best, best_loss = proposed, judged(proposed)
    return Found(best, best_loss, start_loss, evaluations - judged.left)


def _deal(space: Space, budget: int, start: Config, judged: _Judged, evaluations: int) -> Config | None:
    """Ranks by what they gain for each parameter; None where no layer can be asked."""
    layers, ends = len(start), [rank for rank in (space.ranks[-1], space.ranks[0]) if rank != start[0]]
    bunches = np.array_split(np.arange(layers), min(layers, evaluations // max(1, len(ends))) or 1)
    if evaluations < len(ends):
        return None
    gains: list[dict[int, float]] = [{} for _ in start]
    for bunch in bunches:
        known = {start[0]: judged(start)}
        for rank in ends:
            known[rank] = judged(tuple(rank if i in bunch else r for i, r in enumerate(start)))
        ranks = sorted(known)
        for i in bunch:
            # Between what was asked the loss is taken as straight lines.
            gains[i] = {r: float(-np.interp(r, ranks, [known[k] for k in ranks])) / len(bunch) for r in space.ranks}
    config = list(space.uniform(space.ranks[-1]))
    while True:
        room = budget - space.cost(tuple(config))
        rises = [
            ((gains[i][rank] - gains[i][config[i]]) / ((rank - config[i]) * each), i, rank)
            for i, each in enumerate(space.costs)
            for rank in space.ranks
            if rank > config[i] and (rank - config[i]) * each <= room
        ]
        if not rises or max(rises)[0] <= 0:
            return tuple(config)
        _, i, rank = max(rises)
        config[i] = rank


def _neighbour(space: Space, budget: int, config: Config, rng: np.random.Generator) -> Config:
    """Some layers a rank higher, others lower until it fits, and what room is left then used."""
    places = [space.ranks.index(rank) for rank in config]
    most = max(1, math.ceil(len(config) / 8))
    risen = set(rng.permutation(len(config))[: rng.integers(1, most + 1)].tolist())
    for i in risen:
        places[i] = max(0, places[i] - 1)
    for i, step in _moves(rng, len(config), len(space.ranks)):
        fits = space.cost(tuple(space.ranks[p] for p in places)) <= budget
        if step > 0 and not fits and i not in risen:
            places[i] = min(len(space.ranks) - 1, places[i] + 1)
        elif step < 0 and fits and places[i] > 0:
            places[i] -= 1
            if space.cost(tuple(space.ranks[p] for p in places)) > budget:
                places[i] += 1
    found = tuple(space.ranks[p] for p in places)
    return found if space.cost(found) <= budget else config


def _moves(rng: np.random.Generator, layers: int, ranks: int) -> Iterator[tuple[int, int]]:
    """(layer, places down) in random order, as often as a layer can fall; then one place up for each."""
    for _ in range(ranks):
        yield from ((int(i), 1) for i in rng.permutation(layers))
    yield from ((int(i), -1) for i in rng.permutation(layers))
