"""Which option each unit gets: the multiple-choice knapsack, solved to the end wherever that ends.

Units are chosen for independently and their weights and costs add up. With bytes as weights and losses as costs the answer is the least loss
that fits a size; with losses as weights and bytes as costs, the least size for a loss. Method: the linear relaxation by slopes, then dynamic
programming over the few options that can still matter, after Pisinger, "A minimal algorithm for the multiple-choice knapsack problem" (1995).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

STATES = 1 << 16
"""Most partial choices that are carried on. Only if more could matter is the answer not proven the best, and its gap to the bound still holds."""
ROUNDING = 1e-12
"""Sums of floats that differ by less than this share of the capacity are equal."""

Options = Sequence[Sequence[float]]
"""One number for each option of each unit."""
Arrays = list[NDArray[np.float64]]


@dataclass(frozen=True)
class Allocation:
    """An option for each unit."""

    choice: tuple[int, ...]
    weight: float
    cost: float
    bound: float
    """No choice that fits costs less: the least cost of the linear relaxation."""
    proven: bool
    """No choice that fits costs less than this one."""

    @property
    def gap(self) -> float:
        """How much less the best could cost, 0 if this is the best."""
        return 0.0 if self.proven else max(0.0, self.cost - self.bound)


@dataclass(frozen=True)
class _Step:
    """From an option of a unit's hull to the next heavier one."""

    slope: float
    """Cost saved for each unit of weight."""
    unit: int
    to: int
    weight: float
    cost: float


def allocate(weights: Options, costs: Options, capacity: float) -> Allocation:
    """The option for each unit that costs least in all and weighs at most `capacity`.

    Weights must be positive or 0 and finite; integers up to 2^53 are exact.

    Raises:
        ValueError: even the lightest options weigh more than `capacity`.
    """
    return _Solver(weights, costs, capacity).solve()


def frontier(weights: Options, costs: Options, points: int) -> list[tuple[int, ...]]:
    """Choices on the lower hull of total weight against total cost: at most `points`, from the lightest to the one of least cost.

    They are spread evenly over the weights in between.
    """
    w, c = _arrays(weights), _arrays(costs)
    hulls = [_hull(x, y) for x, y in zip(w, c, strict=True)]
    steps = _steps(hulls, w, c)
    whole = sum(step.weight for step in steps)
    choice = [hull[0] for hull in hulls]
    found, passed = [tuple(choice)], 0.0
    for i, step in enumerate(steps):
        choice[step.unit] = step.to
        passed += step.weight
        if i == len(steps) - 1 or passed * (points - 1) >= whole * len(found):
            found.append(tuple(choice))
    return found


class _Solver:
    def __init__(self, weights: Options, costs: Options, capacity: float) -> None:
        self.weights, self.costs = _arrays(weights), _arrays(costs)
        self.capacity = capacity + ROUNDING * abs(capacity)
        hulls = [_hull(w, c) for w, c in zip(self.weights, self.costs, strict=True)]
        choice = [hull[0] for hull in hulls]
        if self._sum(self.weights, choice) > self.capacity:
            raise ValueError(f"the lightest options weigh {self._sum(self.weights, choice):g}, more than {capacity:g}")
        self.slope, self.bound, self.best = self._greedy(choice, _steps(hulls, self.weights, self.costs))
        self.best_cost = self._sum(self.costs, self.best)

    def solve(self) -> Allocation:
        proven = self._finish() if self.best_cost > self.bound else True
        weight, cost = self._sum(self.weights, self.best), self._sum(self.costs, self.best)
        return Allocation(tuple(self.best), weight, cost, min(self.bound, cost), proven)

    def _greedy(self, choice: list[int], steps: Sequence[_Step]) -> tuple[float, float, list[int]]:
        """The slope at which the capacity is used up, the relaxation's cost, and a choice that takes what still fits after that."""
        used, cost = self._sum(self.weights, choice), self._sum(self.costs, choice)
        slope, bound, blocked = 0.0, None, set()
        for step in steps:
            if step.unit in blocked:
                continue
            if used + step.weight > self.capacity:
                if bound is None:
                    slope, bound = step.slope, cost - step.slope * (self.capacity - used)
                blocked.add(step.unit)
                continue
            choice[step.unit] = step.to
            used, cost = used + step.weight, cost - step.cost
        return slope, cost if bound is None else bound, choice

    def _finish(self) -> bool:
        """Dynamic programming from the relaxation's choice on; whether nothing that could matter was left out.

        A total is the bound, plus each option's cost over the relaxation's at this slope, plus the slope times what is left of the capacity. So
        whatever exceeds the best total known is left out.
        """
        over = [c + self.slope * w - (c + self.slope * w).min() for w, c in zip(self.weights, self.costs, strict=True)]
        first = [int(np.lexsort((w, o))[0]) for w, o in zip(self.weights, over, strict=True)]
        able = [self._able(i, over[i]) for i in range(len(over))]
        open_units = [i for i, options in enumerate(able) if len(options) > 1]
        # Those nearest to changing first: they give good choices early, and with those much of the rest need not be looked at.
        open_units.sort(key=lambda i: float(np.partition(over[i][able[i]], 1)[1]))
        fixed = [i for i, options in enumerate(able) if len(options) == 1]
        rest_weight = sum(float(self.weights[i][first[i]]) for i in open_units)
        rest_cost = sum(float(self.costs[i][first[i]]) for i in open_units)
        start = sum(float(self.weights[i][able[i][0]]) for i in fixed), sum(float(self.costs[i][able[i][0]]) for i in fixed)
        states = _States(np.array([start[0]]), np.array([start[1]]), np.zeros(1))
        trail: list[tuple[NDArray[np.int32], NDArray[np.int16]]] = []
        proven = True
        for done, unit in enumerate(open_units):
            rest_weight -= float(self.weights[unit][first[unit]])
            rest_cost -= float(self.costs[unit][first[unit]])
            options = able[unit][over[unit][able[unit]] <= self.best_cost - self.bound]
            states, parents, taken = states.extended(self.weights[unit], self.costs[unit], over[unit], options)
            later = open_units[done + 1 :]
            least = sum(float(self.weights[i][able[i]].min()) for i in later)
            most = sum(float(self.weights[i][able[i]].max()) for i in later)
            unused = np.maximum(0.0, self.capacity - states.weight - most)
            good = self.bound + states.over + self.slope * unused < self.best_cost
            kept = np.flatnonzero(good & (states.weight + least <= self.capacity))
            if len(kept) > STATES:
                kept, proven = np.sort(kept[np.argsort(states.over[kept], kind="stable")[:STATES]]), False
            if not len(kept):
                return proven
            states, parents, taken = states.at(kept), parents[kept], taken[kept]
            trail.append((parents.astype(np.int32), taken.astype(np.int16)))
            # Each state finished as the relaxation would have it.
            totals = np.where(states.weight + rest_weight <= self.capacity, states.cost + rest_cost, np.inf)
            found = int(totals.argmin())
            if totals[found] < self.best_cost:
                self.best = self._traced(found, trail, open_units, first, fixed, able)
                self.best_cost = self._sum(self.costs, self.best)
        return proven

    def _able(self, unit: int, over: NDArray[np.float64]) -> NDArray[np.intp]:
        """Options of a unit that could be in a better choice than the best known, neither heavier and dearer than another."""
        weight, cost = self.weights[unit], self.costs[unit]
        order = np.lexsort((cost, weight))
        before = np.minimum.accumulate(np.concatenate([[np.inf], cost[order][:-1]]))
        kept = order[cost[order] < before]
        within = kept[over[kept] <= self.best_cost - self.bound]
        return within if len(within) else kept[[int(over[kept].argmin())]]

    def _traced(
        self,
        state: int,
        trail: Sequence[tuple[NDArray[np.int32], NDArray[np.int16]]],
        open_units: Sequence[int],
        first: Sequence[int],
        fixed: Sequence[int],
        able: Sequence[NDArray[np.intp]],
    ) -> list[int]:
        choice = list(first)
        for unit in fixed:
            choice[unit] = int(able[unit][0])
        for depth in range(len(trail) - 1, -1, -1):
            parents, taken = trail[depth]
            choice[open_units[depth]] = int(taken[state])
            state = int(parents[state])
        return choice

    @staticmethod
    def _sum(values: Arrays, choice: Sequence[int]) -> float:
        return float(sum(float(v[k]) for v, k in zip(values, choice, strict=True)))


@dataclass(frozen=True)
class _States:
    """Partial choices: what they weigh, cost, and cost over the relaxation's; lighter first, and each dearer than all heavier ones."""

    weight: NDArray[np.float64]
    cost: NDArray[np.float64]
    over: NDArray[np.float64]

    def extended(
        self, weights: NDArray[np.float64], costs: NDArray[np.float64], over: NDArray[np.float64], options: NDArray[np.intp]
    ) -> tuple[_States, NDArray[np.intp], NDArray[np.intp]]:
        """Every state with every option, what is neither lighter nor cheaper than another left out; each one's state before, and option."""
        weight = (self.weight[:, None] + weights[options]).ravel()
        cost = (self.cost[:, None] + costs[options]).ravel()
        order = np.lexsort((cost, weight))
        before = np.minimum.accumulate(np.concatenate([[np.inf], cost[order][:-1]]))
        kept = order[cost[order] < before]
        parents, taken = kept // len(options), options[kept % len(options)]
        return _States(weight[kept], cost[kept], self.over[parents] + over[taken]), parents, taken

    def at(self, places: NDArray[np.intp]) -> _States:
        return _States(self.weight[places], self.cost[places], self.over[places])


def _arrays(values: Options) -> Arrays:
    return [np.asarray(v, np.float64) for v in values]


def _hull(weights: NDArray[np.float64], costs: NDArray[np.float64]) -> list[int]:
    """Options on the lower hull, from the lightest to the one of least cost; its slopes fall."""
    hull: list[int] = []
    for i in np.lexsort((costs, weights)).tolist():
        if hull and costs[i] >= costs[hull[-1]]:
            continue
        while len(hull) > 1 and _slope(weights, costs, hull[-2], hull[-1]) <= _slope(weights, costs, hull[-1], i):
            hull.pop()
        hull.append(i)
    return hull


def _slope(weights: NDArray[np.float64], costs: NDArray[np.float64], a: int, b: int) -> float:
    heavier = float(weights[b]) - float(weights[a])
    return float("inf") if heavier <= 0 else (float(costs[a]) - float(costs[b])) / heavier


def _steps(hulls: Sequence[Sequence[int]], weights: Arrays, costs: Arrays) -> list[_Step]:
    """All steps of all hulls, the most worth first; those of one unit stay in order."""
    steps = [
        _Step(
            _slope(weights[u], costs[u], a, b), u, b, float(weights[u][b]) - float(weights[u][a]), float(costs[u][a]) - float(costs[u][b])
        )
        for u, hull in enumerate(hulls)
        for a, b in pairwise(hull)
    ]
    return sorted(steps, key=lambda step: (-step.slope, step.unit, step.weight))
