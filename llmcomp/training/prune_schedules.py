"""The ratio of pruning, epoch by epoch: call `step()` at the start of every epoch.

schedule = ExponentialMagnitudePruningScheduler(model, mode=mode, initial_ratio=0.1, target_ratio=0.7, target_epoch=5)
for epoch in range(8):
    schedule.step()
    train(model)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from llmcomp.errors import OptionError
from llmcomp.options.modes import PruneMode
from llmcomp.training.masks import check_ratio
from llmcomp.training.prune import RBLoss, parse_mode, set_ratio

Ratio = Callable[[int], float]


def multi_step_ratio(steps: Mapping[int, float]) -> Ratio:
    """Epoch → the ratio of the last step that it has reached, the first one's before.

    Raises:
        OptionError: no steps, epochs that are negative or do not rise, a ratio outside [0, 1).
    """
    epochs = list(steps)
    if not epochs or epochs != sorted(epochs) or epochs[0] < 0:
        raise OptionError(
            "steps", f"{dict(steps)!r} are no epochs that rise from 0 or later", "Write for instance {0: 0.2, 3: 0.5, 5: 0.7}"
        )
    for epoch in epochs:
        check_ratio(steps[epoch], f"steps[{epoch}]")
    return lambda epoch: steps[max((e for e in epochs if e <= epoch), default=epochs[0])]


def exponential_ratio(initial_ratio: float, target_ratio: float, target_epoch: int) -> Ratio:
    """Epoch → ratio; the share that is kept falls by the same factor each epoch: 1 - (1 - r₀) ((1 - r₁)/(1 - r₀))^(epoch/target), r₁ from the target on.

    Raises:
        OptionError: a ratio outside [0, 1), or a target epoch below 1.
    """
    check_ratio(initial_ratio, "initial_ratio")
    check_ratio(target_ratio, "target_ratio")
    if target_epoch < 1:
        raise OptionError("target_epoch", f"{target_epoch!r} is below 1", "Give the epoch in which the target ratio is reached")
    start, end = 1 - initial_ratio, 1 - target_ratio
    return lambda epoch: target_ratio if epoch >= target_epoch else 1 - start * (end / start) ** (epoch / target_epoch)


class PruningScheduler:
    """Applies a ratio each epoch. `epoch` is the one that the next `step()` is for, `current_ratio` the ratio of the last step."""

    def __init__(self, ratio: Ratio, apply: Callable[[float], None]) -> None:
        self._ratio, self._apply = ratio, apply
        self.epoch, self.current_ratio = 0, ratio(0)

    def get_pruning_ratio(self, epoch: int) -> float:
        return self._ratio(epoch)

    def step(self, epoch: int | None = None) -> None:
        """Applies the ratio of this epoch, of the next one when None."""
        now = self.epoch if epoch is None else epoch
        if now < 0:
            raise OptionError("epoch", f"{now!r} is negative", "Count epochs from 0")
        self.current_ratio = self._ratio(now)
        self._apply(self.current_ratio)
        self.epoch = now + 1


class MultiStepMagnitudePruningScheduler(PruningScheduler):
    """`steps` maps an epoch to the ratio from it on."""

    def __init__(self, model: nn.Module, *, mode: PruneMode, steps: Mapping[int, float]) -> None:
        super().__init__(multi_step_ratio(steps), _masks(model, mode))


class ExponentialMagnitudePruningScheduler(PruningScheduler):
    """From `initial_ratio` in epoch 0 to `target_ratio` in `target_epoch`."""

    def __init__(self, model: nn.Module, *, mode: PruneMode, initial_ratio: float, target_ratio: float, target_epoch: int) -> None:
        super().__init__(exponential_ratio(initial_ratio, target_ratio, target_epoch), _masks(model, mode))


class MultiStepRBPruningScheduler(PruningScheduler):
    """`steps` maps an epoch to the ratio that the loss asks for from it on."""

    def __init__(self, rb_loss: RBLoss, steps: Mapping[int, float]) -> None:
        super().__init__(multi_step_ratio(steps), lambda ratio: setattr(rb_loss, "target_ratio", ratio))


class ExponentialRBPruningScheduler(PruningScheduler):
    """The loss asks for `initial_ratio` in epoch 0 and for `target_ratio` from `target_epoch` on."""

    def __init__(self, rb_loss: RBLoss, initial_ratio: float, target_ratio: float, target_epoch: int) -> None:
        super().__init__(
            exponential_ratio(initial_ratio, target_ratio, target_epoch), lambda ratio: setattr(rb_loss, "target_ratio", ratio)
        )


def _masks(model: nn.Module, mode: PruneMode) -> Callable[[float], None]:
    parsed = parse_mode(mode)
    return lambda ratio: set_ratio(model, parsed, ratio)
