"""Budgets, the stage that turns a size or a loss into a plan, and holds what was written against it.

comes in: a graph, options, measured losses
goes out: plans: the first, and after a model was written or judged the next, if that one misses its budget
may import: errors, folding, graph, options, planning, writing
read first: this file, then planning/allocate.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcomp.errors import BudgetError
from llmcomp.folding import choose_folds
from llmcomp.graph.folds import find_folds
from llmcomp.graph.model import ModelGraph
from llmcomp.options import ExportOptions
from llmcomp.planning import Budget, Measured, Plan, Point, make_plan
from llmcomp.planning.allocate import allocate, frontier
from llmcomp.planning.budget import ladder
from llmcomp.writing.layout import layer_room, make_layout

POINTS = 12
"""Rows of the table of sizes against losses."""
ROUNDS = 6
"""Solutions until a size is met. What is not of the layers depends on the plan by a few kB, so the second is the last as a rule."""
REWRITES = 3
"""Models that are written before a size counts as not to be met: scales that turn out to need f32 make a .bin larger than planned."""
EVALUATIONS = 4
"""Models that are judged for a loss."""
CLOSE = 0.8
"""Share of the allowed loss from which on no smaller model is looked for."""
LARGE = 0.99
"""Share of a size below which a plan is said not to need it."""
SAFE = 0.9
"""Share of the allowed loss that the last model to be judged aims at if none has held it before."""


@dataclass(frozen=True)
class Judged:
    """What a written model loses on held-out text, nats per token, and its upper 95 % bound."""

    kl: float
    upper: float
    figures: dict[str, Any]
    """All that the judge says, for the report."""


class Budgeting:
    """One model's way to its budget: `plan` is the one to follow now."""

    def __init__(self, graph: ModelGraph, options: ExportOptions, measured: Measured, xml_bytes: Callable[[Plan], int]) -> None:
        """`xml_bytes` gives the size of the .xml that a plan makes.

        Raises:
            BudgetError: no plan is small enough; the least size is named.
            OptionError, RuleError, GroupSizeError: as `make_plan`.
        """
        assert options.budget is not None
        self.graph, self.options, self.kind, self.xml_bytes = graph, options, options.budget, xml_bytes
        self.folds = find_folds(graph, options.awq)
        self.found = ladder(graph.layers, options, measured)
        self.rooms = [
            [layer_room(layer, line.scheme) for line in lines] for layer, lines in zip(graph.layers, self.found.lines, strict=True)
        ]
        self.interaction = measured.interaction
        self.limit = self._limit()
        self.excess = 0
        """Bytes by which models came out larger than planned."""
        self.written = 0
        self.evaluations: list[dict[str, Any]] = []
        """A line for the report on each model that was judged."""
        self.tried: list[Plan] = []
        self.held: Plan | None = None
        """The smallest that was judged and holds the loss."""
        self.evaluation: dict[str, Any] | None = None
        """What the judge says about it."""
        self.plan: Plan
        if self.kind != "max_loss":
            self._smallest()

    def begin(self) -> None:
        """Make the first plan."""
        if self.kind == "target_size":
            self._add_xml()
        self.plan = self._for_loss(self.limit) if self.kind == "max_loss" else self._for_size()

    def misses(self, xml: Path, judge: Callable[[], Judged]) -> bool:
        """Whether another model is to be written in place of the one at `xml`, by the `plan` from now on.

        Raises:
            BudgetError: the budget cannot be met.
        """
        if self.kind == "max_loss":
            return self.plan is not self.held and self._loses_too_much(judge())
        written = xml.with_suffix(".bin").stat().st_size
        return self._too_large(written + xml.stat().st_size if self.kind == "target_size" else written)

    def _too_large(self, written: int) -> bool:
        """A written model that exceeds the size makes room for a smaller one; otherwise the plan gets the true size."""
        over = written - self.limit
        if over <= 0:
            self.plan = _reaching(self.plan, self._unit(written))
            return False
        self.written += 1
        self.excess += over
        if self.written == REWRITES:
            raise BudgetError(
                self._name, f"{REWRITES} models came out larger than planned, the last by {over} bytes", "Allow a little more"
            )
        self.plan = self._for_size()
        return True

    def _loses_too_much(self, judged: Judged) -> bool:
        """A model that misses the loss, or holds it by so much that a smaller one might, makes room for another."""
        budget = self.plan.budget
        assert budget is not None
        holds = judged.upper <= self.limit
        line = {"weight_bytes": self.plan.summary.bytes, "predicted": budget.nats, "kl": judged.kl, "upper": judged.upper, "holds": holds}
        self.evaluations.append(line)
        self.tried.append(self.plan)
        if holds and (self.held is None or self.plan.summary.bytes < self.held.summary.bytes):
            self.held, self.evaluation = _reaching(self.plan, judged.kl), judged.figures
        close = holds and judged.upper >= CLOSE * self.limit
        if not close and len(self.evaluations) < EVALUATIONS and budget.nats > 0:
            self.interaction *= judged.upper / budget.nats
            last_hope = self.held is None and len(self.evaluations) == EVALUATIONS - 1
            plan = self._for_loss(self.limit * (SAFE if last_hope else 1))
            if all(plan.layers != other.layers for other in self.tried):
                self.plan = plan
                return True
        if self.held is None:
            best = min(self.evaluations, key=lambda one: float(one["upper"]))
            raise BudgetError(
                self._name,
                f"of {len(self.evaluations)} models that were made and judged the best loses {best['kl']:.5f} nats per token, "
                f"{best['upper']:.5f} by the upper 95 % bound",
                "Allow that, measure more precise candidates, or add --awq --scale-estimation --gptq",
            )
        again = self.held.layers != self.plan.layers
        self.plan = self.held
        return again

    def told(self) -> dict[str, Any]:
        """The budget's part of the report."""
        assert self.plan.budget is not None
        return {**self.plan.budget.model_dump(), "evaluations": self.evaluations}

    @property
    def _name(self) -> str:
        value, flag = getattr(self.options, self.kind), f"--{self.kind.replace('_', '-')}"
        return (
            f"{flag} {value:g}" if isinstance(value, float) else f"{flag} {value}" if isinstance(value, str) else f"{flag} {value:,} bytes"
        )

    def _limit(self) -> Any:
        """Bytes, or nats, that must not be exceeded."""
        if self.options.max_loss is not None:
            return self.options.max_loss
        if self.options.target_bpw is not None:
            return int(self.options.target_bpw * self.graph.elements / 8)
        size = self.options.target_size
        return size if isinstance(size, int) else self._bytes(make_plan(self.graph.layers, self.options))

    def _add_xml(self) -> None:
        """Let candidates take room in the .xml, too: chains differ by kilobytes of text.

        What a scheme takes on average, tried on all layers that may have it, is close enough: whole plans are sized exactly.
        """
        lines = self.found.lines
        plain = self.xml_bytes(self.found.plan([0] * len(lines)))
        for scheme in {(line.format, line.group_size) for own in lines for line in own[1:]}:
            places = {i: k for i, own in enumerate(lines) for k, line in enumerate(own) if k and (line.format, line.group_size) == scheme}
            more = self.xml_bytes(self.found.plan([places.get(i, 0) for i in range(len(lines))])) - plain
            for i, k in places.items():
                self.rooms[i][k] += round(more / len(places))

    def _unit(self, nbytes: int) -> float:
        """Bytes in the unit of the budget."""
        return 8 * nbytes / self.graph.elements if self.kind == "target_bpw" else nbytes

    def _bin_bytes(self, plan: Plan) -> int:
        return make_layout(self.graph, plan.schemes, choose_folds(self.graph, plan, self.folds)).size

    def _bytes(self, plan: Plan) -> int:
        """What counts against the size."""
        return self._bin_bytes(plan) + (self.xml_bytes(plan) if self.kind == "target_size" else 0)

    def _for_size(self) -> Plan:
        """The plan of least predicted loss that fits; BudgetError as `_smallest`."""
        limit = self.limit - self.excess
        smallest, size = self._smallest()
        least = sum(rooms[k] for rooms, k in zip(self.rooms, smallest, strict=True))
        choice: Sequence[int] = smallest
        cost, bound, proven, other = self._nats(smallest), float("inf"), False, size - least
        for _ in range(ROUNDS):
            solved = allocate(self.rooms, self.found.nats, max(limit - other, least))
            bound, before = min(bound, solved.bound), other
            now = self._bytes(self.found.plan(solved.choice))
            other = now - int(solved.weight)
            if now <= limit and solved.cost <= cost:
                # Proven if the room that it was solved for is the room that there is.
                choice, size, cost, proven = solved.choice, now, solved.cost, solved.proven and other == before
            if other == before:
                break
        # Bounds of earlier rounds were for room that there is not.
        bound = cost if proven else min(bound, cost)
        return self._budgeted(
            choice, self._unit(size), cost * self.interaction, bound * self.interaction, (cost - bound) * self.interaction
        )

    def _smallest(self) -> tuple[list[int], int]:
        """The choice of fewest bytes, and what counts of it against the size.

        Raises:
            BudgetError: it does not fit.
        """
        options = [list(zip(rooms, nats, strict=True)) for rooms, nats in zip(self.rooms, self.found.nats, strict=True)]
        choice = [min(range(len(own)), key=own.__getitem__) for own in options]
        size = self._bytes(self.found.plan(choice))
        if size > self.limit - self.excess:
            told = f"{size:,} bytes ({size / 1e6:.1f} MB)" if self.kind == "target_size" else f"{self._unit(size):.4f} bits per weight"
            more = f", and models come out {self.excess} bytes larger than planned" if self.excess else ""
            raise BudgetError(
                self._name, f"the smallest model that the candidates make has {told}{more}", "Allow that, or measure smaller candidates"
            )
        return choice, size

    @property
    def _least_nats(self) -> float:
        return sum(min(nats) for nats in self.found.nats)

    def _nats(self, choice: Sequence[int]) -> float:
        """Losses of a choice, interaction left out."""
        return sum(losses[k] for losses, k in zip(self.found.nats, choice, strict=True))

    def _for_loss(self, limit: float) -> Plan:
        """The smallest plan that is predicted to keep the loss; if none is, the one that is predicted to lose least."""
        solved = allocate(self.found.nats, self.rooms, max(limit / self.interaction, self._least_nats))
        predicted = solved.weight * self.interaction
        return self._budgeted(solved.choice, predicted, predicted, solved.bound, solved.gap)

    def _budgeted(self, choice: Sequence[int], reached: float, nats: float, bound: float, gap: float) -> Plan:
        """The plan of a choice with its figures."""
        budget = Budget(
            kind=self.kind,
            requested=self._unit(self.limit) if self.kind != "max_loss" else self.limit,
            reached=reached,
            nats=nats,
            bound=bound,
            gap=gap,
            interaction=self.interaction,
            table=self._table(),
        )
        plan, told, unknown = self.found.plan(choice), [], self.found.unknown
        if unknown:
            told.append(f"{len(unknown)} layers keep what they have without a budget, as their loss was not measured: {unknown[0]} for one")
        if self.kind != "max_loss" and nats <= self._least_nats * self.interaction and reached < LARGE * self._unit(self.limit):
            told.append(f"{self._name}: the best that the candidates make takes no more; measure more precise ones to use the rest")
        if self.kind == "max_loss" and self._least_nats * self.interaction > self.limit:
            told.append(f"{self._name}: no plan is predicted to keep it; this one is predicted to lose least")
        return plan.model_copy(update={"budget": budget, "notes": tuple(told)})

    def _table(self) -> tuple[Point, ...]:
        points = []
        for choice in frontier(self.rooms, self.found.nats, POINTS):
            size = self._bin_bytes(self.found.plan(choice))
            nats = self.interaction * self._nats(choice)
            points.append(Point(bin_bytes=size, bits_per_weight=round(8 * size / self.graph.elements, 4), nats=nats))
        return tuple(points)


def _reaching(plan: Plan, reached: float) -> Plan:
    assert plan.budget is not None
    return plan.model_copy(update={"budget": plan.budget.model_copy(update={"reached": reached})})
