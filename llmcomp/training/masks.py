"""Masks over weights: which weights fall, as arithmetic, and the two modules through which a pruned weight is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import nn

from llmcomp.errors import OptionError
from llmcomp.training.fake_quantize import OPS

START = 0.99
"""Probability with which a trainable mask keeps a weight at first."""


def check_ratio(ratio: float, thing: str = "ratio") -> None:
    """
    Raises:
        OptionError: outside [0, 1), or no number.
    """
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio < 1:
        raise OptionError(thing, f"{ratio!r} is not a number in [0, 1)", "Give the share of weights that become zero, such as 0.7")


def fallen_count(ratio: float, total: int) -> int:
    """floor(ratio · total), the ratio taken as the decimal that is written: 0.7 of 10 are 7. One weight stays at least, since ratio < 1."""
    return math.floor(Fraction(repr(float(ratio))) * total)


def kept_largest(importance: torch.Tensor, fallen: int) -> torch.Tensor:
    """False for exactly the `fallen` smallest of a flat tensor. Among equals at the threshold the first fall."""
    if fallen == 0:
        return torch.ones_like(importance, dtype=torch.bool)
    threshold = torch.kthvalue(importance, fallen).values
    kept = importance > threshold
    staying = importance.numel() - fallen - int(kept.sum())
    if staying:
        kept[torch.nonzero(importance == threshold).flatten()[-staying:]] = True
    return kept


def local_masks(weights: Sequence[torch.Tensor], ratio: float) -> list[torch.Tensor]:
    """For each tensor: its smallest magnitudes fall, `fallen_count` of them."""
    return [kept_largest(w.detach().float().abs().flatten(), fallen_count(ratio, w.numel())).reshape(w.shape) for w in weights]


def global_masks(weights: Sequence[torch.Tensor], ratio: float) -> list[torch.Tensor]:
    """The smallest |w| / ‖w‖₂ of all tensors together fall; a tensor of zeros falls first. Equals fall in the order of the tensors."""
    sizes = [w.numel() for w in weights]
    pooled = torch.cat([_normalised(w) for w in weights])
    kept = kept_largest(pooled, fallen_count(ratio, pooled.numel()))
    return [part.reshape(w.shape).to(w.device) for part, w in zip(kept.split(sizes), weights, strict=True)]


def _normalised(w: torch.Tensor) -> torch.Tensor:
    size = w.detach().float().abs().flatten()
    # The norm in f64: an f32 sum over a large tensor would move the weights of a whole layer in the ranking.
    norm = float(torch.linalg.vector_norm(size, dtype=torch.float64))
    return (size / norm if norm else size).cpu()


class BinaryMask(nn.Module):  # type: ignore[misc]
    """w ↦ w · mask; what has fallen gets no gradient, keeps its value below the mask, and may come back when masks are taken anew."""

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("binary_mask", mask)

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w * self.binary_mask

    def binary(self) -> torch.Tensor:
        """Bool, True where the weight is kept."""
        return self.binary_mask


class TrainableMask(nn.Module):  # type: ignore[misc]
    """w ↦ w · step(σ(mask) - 1/2), with the gradient of σ for that of the step (Louizos et al. 2018, in NNCF's form).

    In training each weight is kept with probability σ(mask): the logistic noise log u/(1 - u) is added to the logit. In evaluation without noise.
    """

    def __init__(self, shape: torch.Size, device: torch.device) -> None:
        super().__init__()
        self.mask = nn.Parameter(torch.full(shape, math.log(START / (1 - START)), device=device))

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        logits = self.mask
        if self.training:
            u = torch.rand_like(logits).clamp(1e-6, 1 - 1e-6)
            logits = logits + torch.log(u / (1 - u))
        return w * step(torch.sigmoid(logits)).to(w.dtype)

    def soft(self) -> torch.Tensor:
        """The mask without noise, 0 or 1, with σ's gradient."""
        return step(torch.sigmoid(self.mask))

    def binary(self) -> torch.Tensor:
        """Bool, True where the weight is kept."""
        return self.mask.detach() > 0


def step(probability: torch.Tensor) -> torch.Tensor:
    """1 above a half, else 0; straight through to gradients. round() takes exactly a half to the even 0."""
    return torch.as_tensor(OPS.round(probability))
