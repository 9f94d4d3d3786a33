"""8-bit fake quantizers with learned ranges, for weights and activations.

Both compute y = (clip(round(x / s + z), low, high) - z) s, torch's own `fake_quantize` to the bit, and differentiate it with the remainders of the two
roundings held constant (straight-through; Bengio et al. 2013). With one scale s of a symmetric quantizer that is LSQ (Esser et al. 2020, equation 3):

    inside [low, high]   dy/dx = 1, dy/ds = (y - x) / s;   outside   dy/dx = 0, dy/ds = the bound's code.

A symmetric quantizer learns its upper bound a = high s, so dy/da = (y - x) / a inside, 1 above and low / high below. An asymmetric one learns its lower
bound l and its width r = 255 s, the zero point z being round(-l / s): dy/dr = (y - x) / r inside, 1 above; dy/dl = 0 inside, 1 outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from llmcomp.training.fake_quantize import OPS

ACTIVATION = "input_quantizer"
"""Attribute under which a layer keeps the quantizer of its input."""
LEVELS = 255
SMALLEST = 8e-5
"""Smallest upper bound of a symmetric range; ten times it is the smallest width of an asymmetric one (NNCF's numbers)."""
GUARD = 1e-12
"""Keeps a range that training drives to zero from dividing by it."""


class RangeQuantizer(nn.Module):  # type: ignore[misc]
    """Common to both. `axis` is the channels' axis, with one range each, or None for one range of the whole tensor."""

    def __init__(self, axis: int | None) -> None:
        super().__init__()
        self.axis = axis

    def codes(self) -> tuple[int, int]:
        """First and last code."""
        raise NotImplementedError

    def grid(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Positive step and whole zero point, of the ranges' shape, differentiable."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step, zero = self.grid()
        low, high = self.codes()
        codes = OPS.clip(OPS.round(x.float() * step.reciprocal() + zero), float(low), float(high))
        return ((codes - zero) * step).to(x.dtype)

    def fixed(self) -> FixedQuantizer:
        """The same function by torch's own operation."""
        with torch.no_grad():
            step, zero = self.grid()
        low, high = self.codes()
        # ONNX knows the whole range of a byte only; what is clipped to -127 before does not feel the difference.
        return FixedQuantizer(step.flatten().float(), zero.flatten().to(torch.int32), self.axis, -128 if low < 0 else low, high)


class SymmetricQuantizer(RangeQuantizer):
    """Learns `scale`, the largest value that is represented, per channel or one, broadcast over a tensor.

    Signed weights have the codes -127..127 (`narrow`), signed activations -128..127, unsigned ones 0..255.
    """

    def __init__(self, high: torch.Tensor, axis: int | None = None, signed: bool = True, narrow: bool = False) -> None:
        super().__init__(axis)
        self.signed, self.narrow = signed, narrow
        self.scale = nn.Parameter(high.detach().clone().float())

    def codes(self) -> tuple[int, int]:
        if not self.signed:
            return 0, LEVELS
        return (-127 if self.narrow else -128), 127

    def grid(self) -> tuple[torch.Tensor, torch.Tensor]:
        step = (self.scale.abs() + GUARD) / self.codes()[1]
        return step, torch.zeros_like(step)

    def get_extra_state(self) -> dict[str, bool]:
        return {"signed": self.signed, "narrow": self.narrow}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        self.signed, self.narrow = bool(state["signed"]), bool(state["narrow"])


class AsymmetricQuantizer(RangeQuantizer):
    """Learns `input_low` and `input_range`; zero is always inside and always exact. Codes 0..255."""

    def __init__(self, low: torch.Tensor, width: torch.Tensor, axis: int | None = None) -> None:
        super().__init__(axis)
        self.input_low = nn.Parameter(low.detach().clone().float())
        self.input_range = nn.Parameter(width.detach().clone().float())

    def codes(self) -> tuple[int, int]:
        return 0, LEVELS

    def grid(self) -> tuple[torch.Tensor, torch.Tensor]:
        width = self.input_range.abs() + GUARD
        low = OPS.clip(self.input_low, -float("inf"), 0.0)
        # A range that lies below zero altogether is stretched to it, as one above is by the clip.
        width = torch.where(low + width < 0, -low, width)
        step = width / LEVELS
        return step, OPS.clip(OPS.round(-low / step), 0.0, float(LEVELS))


class FixedQuantizer(nn.Module):  # type: ignore[misc]
    """torch.fake_quantize_* with ranges that no longer change; codes low..high."""

    def __init__(self, scale: torch.Tensor, zero_point: torch.Tensor, axis: int | None, low: int, high: int) -> None:
        super().__init__()
        self.axis, self.low, self.high = axis, low, high
        self.register_buffer("scale", scale)
        self.register_buffer("zero_point", zero_point)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # torch's operation wants f32; in an f32 model no conversion gets into the exported graph.
        return self._rounded(x) if x.dtype is torch.float32 else self._rounded(x.float()).to(x.dtype)

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        if self.axis is None:
            return torch.fake_quantize_per_tensor_affine(x, self.scale[0], self.zero_point[0], self.low, self.high)
        return torch.fake_quantize_per_channel_affine(x, self.scale, self.zero_point, self.axis, self.low, self.high)


def symmetric(low: torch.Tensor, high: torch.Tensor, axis: int | None = None, weights: bool = False) -> SymmetricQuantizer:
    """Covers the seen bounds. An activation that is never negative is unsigned. A bound is no smaller than a hundredth of the largest channel's,
    so that the noise of an empty channel is not magnified."""
    largest = torch.maximum(low.abs(), high.abs())
    floor = max(0.01 * float(largest.max()), SMALLEST)
    return SymmetricQuantizer(largest.clamp_min(floor), axis, signed=weights or bool((low < 0).any()), narrow=weights)


def asymmetric(low: torch.Tensor, high: torch.Tensor, axis: int | None = None) -> AsymmetricQuantizer:
    """Covers the seen bounds and zero, exactly: of the two whole zero points beside -low / s, and the border that each moves outwards, the wider range."""
    low, high = low.clamp_max(0).float(), high.clamp_min(0).float()
    thin = high - low < 10 * SMALLEST
    low, high = torch.where(thin, low - 10 * SMALLEST, low), torch.where(thin, high + 10 * SMALLEST, high)
    zero = torch.round(-low / (high - low) * LEVELS)
    # With z codes below zero the step must reach both borders: s ≥ -low / z and s ≥ high / (255 - z).
    inside = (zero > 0) & (zero < LEVELS)
    step = torch.maximum(-low / zero.clamp(1, LEVELS), high / (LEVELS - zero).clamp(1, LEVELS))
    step = torch.where(inside, step, (high - low) / LEVELS)
    return AsymmetricQuantizer(-zero * step, LEVELS * step, axis)


def weight_quantizer(weight: torch.Tensor, axis: int) -> SymmetricQuantizer:
    """One symmetric range for each channel of the axis, its largest magnitude."""
    others = [i for i in range(weight.ndim) if i != axis]
    w = weight.detach().float()
    return symmetric(w.amin(others, keepdim=True), w.amax(others, keepdim=True), axis, weights=True)
