"""Pruning: binary masks over a torch model's weights, chosen by magnitude or learned, and how much of the model is zero.

`prune` puts masks on; train on, with a schedule of `prune_schedules.py` that raises the ratio, or with `RBLoss` added to the task's loss;
`strip.strip` makes it a plain model whose fallen weights are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from llmcomp.errors import OptionError
from llmcomp.options import IgnoredScope
from llmcomp.options.modes import PruneMode
from llmcomp.training.masks import BinaryMask, TrainableMask, check_ratio, global_masks, local_masks
from llmcomp.training.weights import check_finite, find_weights, kept, parametrizations

CHOOSERS: dict[PruneMode, Callable[[Sequence[torch.Tensor], float], list[torch.Tensor]]] = {
    PruneMode.UNSTRUCTURED_MAGNITUDE_LOCAL: local_masks,
    PruneMode.UNSTRUCTURED_MAGNITUDE_GLOBAL: global_masks,
}
LEARNED = PruneMode.UNSTRUCTURED_REGULARIZATION_BASED


def prune(
    model: nn.Module,
    mode: PruneMode,
    *,
    ratio: float | None = None,
    ignored_scope: IgnoredScope | None = None,
    examples_inputs: Any = None,
) -> nn.Module:
    """The model itself, with masks on the weights of its linear layers, convolutions and embeddings. Tied weights have one mask.

    Args:
        ratio: share of the masked weights that become zero, in [0, 1), for the magnitude modes. None for the learned mode, whose ratio `RBLoss` asks for.
        ignored_scope: weights that stay whole, by the name of the weight or its module, or `types` of module classes such as Embedding.
        examples_inputs: inputs of one run (a mapping by keyword, a tuple by position); bare parameters that it multiplies as matrices are masked too.

    A second call with a magnitude mode takes the masks anew from the weights below them.

    Raises:
        OptionError: no ratio, one outside [0, 1), one where none belongs, or masks of the other kind are on the model.
        RuleError: an ignored scope that names nothing, or everything.
        NonFiniteWeightError: NaN or Inf in a weight.
    """
    mode = parse_mode(mode)
    if mode is LEARNED and ratio is not None:
        raise OptionError("ratio", f"{mode.value} learns its masks, from none on", "Leave it out, and give the ratio to RBLoss")
    if mode is not LEARNED:
        if ratio is None:
            raise OptionError("ratio", f"{mode.value} needs one", "Give the share of weights that become zero, such as ratio=0.7")
        check_ratio(ratio)
    weights = kept(find_weights(model, examples_inputs), ignored_scope)
    wanted, other = (TrainableMask, BinaryMask) if mode is LEARNED else (BinaryMask, TrainableMask)
    for weight in weights:
        if weight.find(other) is not None:
            raise OptionError(
                f"weight {weight.name}", f"it has a {other.__name__} already", "Strip the model before it is pruned in another way"
            )
    check_finite(weights)
    for weight in weights:
        if weight.find(wanted) is None:
            w = weight.original
            weight.add(TrainableMask(w.shape, w.device) if mode is LEARNED else BinaryMask(torch.ones_like(w, dtype=torch.bool)))
    if ratio is not None:
        set_ratio(model, mode, ratio)
    return model


def parse_mode(mode: PruneMode | str) -> PruneMode:
    """
    Raises:
        OptionError: no such mode.
    """
    try:
        return PruneMode(mode)
    except ValueError:
        raise OptionError("mode", f"{mode!r} is none", f"Use one of {', '.join(f'PruneMode.{m.name}' for m in PruneMode)}") from None


def set_ratio(model: nn.Module, mode: PruneMode, ratio: float) -> None:
    """Takes the masks of a model that `prune` has given them anew, from the weights as they are now.

    Raises:
        OptionError: a ratio outside [0, 1), the learned mode, or a model without binary masks.
        NonFiniteWeightError: training has brought NaN or Inf into a weight.
    """
    check_ratio(ratio)
    if mode not in CHOOSERS:
        raise OptionError("mode", f"{mode.value} learns its masks", "Use a magnitude mode, or a schedule of RBLoss")
    masked = list(parametrizations(model, BinaryMask))
    if not masked:
        raise OptionError("model", "it has no binary masks", "Call prune with a magnitude mode first")
    check_finite(weight for weight, _ in masked)
    for (_, mask), chosen in zip(masked, CHOOSERS[mode]([weight.original for weight, _ in masked], ratio), strict=True):
        mask.binary_mask.copy_(chosen)


class RBLoss(nn.Module):  # type: ignore[misc]
    """((mean of the masks - (1 - target_ratio)) / p)² over all learned masks; add it to the task's loss.

    `p` is the distance from the target at which the loss is 1. OptionError: a ratio outside [0, 1), p not positive, or no learned masks.
    """

    def __init__(self, model: nn.Module, target_ratio: float, p: float = 0.05) -> None:
        super().__init__()
        check_ratio(target_ratio, "target_ratio")
        if not p > 0:
            raise OptionError("p", f"{p!r} is not positive", "Give the distance from the target at which the loss is 1, such as 0.05")
        # In a tuple, which nn.Module does not register: the masks' parameters are the model's, not the loss's.
        self._masks: tuple[TrainableMask, ...] = tuple(mask for _, mask in parametrizations(model, TrainableMask))
        if not self._masks:
            raise OptionError("model", "it has no learned masks", "Call prune with PruneMode.UNSTRUCTURED_REGULARIZATION_BASED first")
        self.target_ratio, self.p = float(target_ratio), float(p)

    @property
    def current_ratio(self) -> float:
        """Share of the masked weights that would fall now."""
        kept_weights = sum(int(mask.binary().sum()) for mask in self._masks)
        return 1 - kept_weights / sum(mask.mask.numel() for mask in self._masks)

    def forward(self) -> torch.Tensor:
        total = sum(mask.mask.numel() for mask in self._masks)
        mean = sum(mask.soft().sum() for mask in self._masks) / total
        return ((mean - (1 - self.target_ratio)) / self.p) ** 2


@dataclass(frozen=True)
class TensorPruningStatistic:
    """Share of zeros in one masked tensor."""

    tensor_name: str
    shape: tuple[int, ...]
    pruned_ratio: float


@dataclass(frozen=True)
class ModelPruningStatistic:
    """`pruning_ratio`: share of zeros among masked weights; `global_pruning_ratio`: those zeros among all the model's parameters."""

    pruning_ratio: float
    global_pruning_ratio: float
    pruned_tensors: list[TensorPruningStatistic]

    def __str__(self) -> str:
        rows = [(t.tensor_name, " x ".join(map(str, t.shape)), f"{t.pruned_ratio:.3f}") for t in self.pruned_tensors]
        rows += [("masked weights", "", f"{self.pruning_ratio:.3f}"), ("all parameters", "", f"{self.global_pruning_ratio:.3f}")]
        rows.insert(0, ("tensor", "shape", "zeros"))
        wide = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join(f"{name:<{wide[0]}}  {shape:<{wide[1]}}  {zeros:>{wide[2]}}" for name, shape, zeros in rows)


def pruning_statistic(model: nn.Module) -> ModelPruningStatistic:
    """How many masked weights are zero, each tensor and in total; a tied weight counts once, a mask's own logits are no parameters of the model.

    Raises:
        OptionError: a model without masks.
    """
    tensors, zeros, masked = [], 0, 0
    masks = list(parametrizations(model, (BinaryMask, TrainableMask)))
    if not masks:
        raise OptionError("model", "it has no masks", "Call prune first; of a stripped model count the zeros themselves")
    for weight, mask in masks:
        fallen, size = int((weight.original.detach() * mask.binary() == 0).sum()), weight.original.numel()
        tensors.append(TensorPruningStatistic(weight.name, tuple(weight.original.shape), fallen / size))
        zeros, masked = zeros + fallen, masked + size
    own = {id(mask.mask) for _, mask in masks if isinstance(mask, TrainableMask)}
    total = sum(p.numel() for p in model.parameters() if id(p) not in own)
    return ModelPruningStatistic(zeros / masked, zeros / total, tensors)
