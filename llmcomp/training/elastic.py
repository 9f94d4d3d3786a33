"""Adapters of elastic rank: how many leading ranks of each are in use, and what is left when the others are cut off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from llmcomp.errors import OptionError
from llmcomp.training.nls import Config, Found, Space, check_ranks, search
from llmcomp.training.quantized import FakeQuantizedWeight, adapted
from llmcomp.training.settings import Elastic


def layers_of(model: Any) -> dict[str, FakeQuantizedWeight]:
    """Module's name -> what has its adapter, in the model's order; tied modules once."""
    return {name: one for name, _, one in adapted(model)}


def space_of(model: Any, ranks: Sequence[int]) -> Space:
    """The candidates that the adapters of `model` hold.

    Raises:
        OptionError: no adapters, ranks that are no choice, or an adapter that is not of the largest of them.
    """
    found, chosen = layers_of(model), check_ranks(ranks)
    if not found:
        raise OptionError("ranks", "the model has no adapters", f"Begin with adapters of rank {chosen[0]}")
    for name, one in found.items():
        if one.rank != chosen[0]:
            raise OptionError(f"rank {chosen[0]} for {name}", f"its adapter has rank {one.rank}", f"Begin with rank {chosen[0]}")
    return Space(chosen, tuple(sum(one.shape) for one in found.values()))


def set_ranks(model: Any, config: Sequence[int]) -> None:
    """From now on the adapters of `model` use as many leading ranks, each as `config` says in the model's order.

    Raises:
        OptionError: more or fewer ranks than adapters, or one that an adapter does not have.
    """
    found = layers_of(model)
    if len(config) != len(found):
        raise OptionError(f"{len(config)} ranks", f"the model has {len(found)} adapters", "Give one for each")
    for (name, one), rank in zip(found.items(), config, strict=True):
        if not 0 <= rank <= one.rank:
            raise OptionError(f"rank {rank} for {name}", f"its adapter has rank {one.rank}", f"Give 0 to {one.rank}")
    for one, rank in zip(found.values(), config, strict=True):
        one.active = rank


def active_ranks(model: Any) -> dict[str, int]:
    """Module's name -> leading ranks in use."""
    return {name: one.active for name, one in layers_of(model).items()}


class RankSearch:
    """The ranks of one run: drawn in its steps, then searched for."""

    def __init__(self, student: Any, settings: Elastic, seed: int) -> None:
        """
        Raises:
            OptionError: as `space_of`, or a budget below the smallest ranks.
        """
        self.student, self.settings, self.seed = student, settings, seed
        self.space = space_of(student, settings.ranks)
        self.start, self.budget = self.space.start(settings.budget)
        self.share = settings.share

    def draw(self, step: int) -> Config:
        return self.space.draw(self.seed, step)

    def use(self, config: Sequence[int]) -> None:
        set_ranks(self.student, config)

    def in_use(self) -> dict[str, int]:
        return active_ranks(self.student)

    def find(self, judge: Callable[[], float], evaluations: int | None = None) -> Found:
        """By the held-out loss of the student as it is; `evaluations` is a bound below that of the settings."""

        def of_config(config: Config) -> float:
            self.use(config)
            return judge()

        most = self.settings.evaluations if evaluations is None else max(1, min(evaluations, self.settings.evaluations))
        return search(self.space, self.budget, of_config, most, self.seed)


@torch.no_grad()  # type: ignore[untyped-decorator]
def cut(model: Any) -> dict[str, int]:
    """Leave nothing of the adapters but what is in use; the model computes the same. Returns the ranks, 0 where no adapter is left."""
    ranks = active_ranks(model)
    for one in layers_of(model).values():
        assert one.lora_A is not None and one.lora_B is not None
        if one.active:
            one.lora_A = torch.nn.Parameter(one.lora_A[: one.active].clone(), one.lora_A.requires_grad)
            one.lora_B = torch.nn.Parameter(one.lora_B[:, : one.active].clone(), one.lora_B.requires_grad)
        else:
            one.lora_A = one.lora_B = None
    return ranks
