"""Learning rates over the share of the budget that is used, be it steps or seconds; the curves are transformers' own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import get_scheduler

TICKS = 1_000_000
"""Steps of the library's curve, which is asked at fractions of its length."""


def curve(name: str, warmup_share: float) -> Callable[[float], float]:
    """The factor of the highest rate at a share of the budget in [0, 1]; `name` as transformers' `get_scheduler` knows it."""
    idle = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = get_scheduler(name, idle, num_warmup_steps=round(warmup_share * TICKS), num_training_steps=TICKS)
    factor = scheduler.lr_lambdas[0]
    return lambda share: float(factor(min(max(share, 0.0), 1.0) * TICKS))


@dataclass
class StepBudget:
    """A number of steps: everything is a function of the step."""

    steps: int

    def share(self, step: int) -> float:
        return step / self.steps

    def ended(self, step: int) -> bool:
        return step >= self.steps

    def tick(self, step: int, elapsed: float) -> None:
        """The clock says nothing to it."""

    def total(self, step: int) -> int:
        """Steps there will be."""
        return self.steps


@dataclass
class ClockBudget:
    """Seconds since the start: rates fall to zero as they run out, and no step begins that would end behind them."""

    seconds: float
    reserve: float = 0.0
    """For the last evaluation."""
    elapsed: float = 0.0
    step_seconds: float = 0.0
    """Mean of the steps so far."""
    _first: tuple[int, float] | None = field(default=None, repr=False)

    def tick(self, step: int, elapsed: float) -> None:
        """`elapsed` seconds have passed before this step; all processes must be told the same."""
        self.elapsed = elapsed
        if self._first is None:
            self._first = (step, elapsed)
        elif step > self._first[0]:
            self.step_seconds = (elapsed - self._first[1]) / (step - self._first[0])

    def share(self, step: int) -> float:
        return self.elapsed / max(self.seconds - self.reserve, 1e-9)

    def ended(self, step: int) -> bool:
        return self.elapsed + self.step_seconds > self.seconds - self.reserve

    def total(self, step: int) -> int:
        """Steps there will be, if the others take as long."""
        left = self.seconds - self.reserve - self.elapsed
        return step + (max(0, int(left / self.step_seconds)) if self.step_seconds else 1)


Budget = StepBudget | ClockBudget


@dataclass
class Stopwatch:
    """Seconds of a run, those before it was resumed included."""

    before: float = 0.0
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return self.before + time.monotonic() - self.started
