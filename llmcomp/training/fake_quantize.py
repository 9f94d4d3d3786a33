"""Fake quantization: a weight as its codes and stored scale will stand for it, with gradients for the weight, the scale and the zero point.

The arithmetic is the number format's own, run on torch with a straight-through `round` (Bengio et al. 2013): what rounding adds counts as a constant, so
a weight inside the range passes its gradient on, one outside passes none, and the scale s of w' = (q - z) s gets q - z - w/s inside and q - z outside, as in
LSQ (Esser et al. 2020, equation 3). The scale is rounded to f16, in which it is stored, straight-through too.
"""

from __future__ import annotations

from typing import Any

import torch

from llmcomp.errors import OptionError
from llmcomp.formats import Format, grouped_shape
from llmcomp.formats.int import IntAsym, IntSym


class _Through(torch.autograd.Function):  # type: ignore[misc]
    """The second tensor, exactly, with the gradient of the first: x + (value - x) would be off by a rounding, and a level at a bound beyond it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


class StraightThrough:
    """The operations that integer formats encode and decode with, on f32 tensors; `round` is the identity to what asks for gradients."""

    def add(self, x: Any, y: Any) -> Any:
        return x + y

    def subtract(self, x: Any, y: Any) -> Any:
        return x - y

    def multiply(self, x: Any, y: Any) -> Any:
        return x * y

    def divide(self, x: Any, y: Any) -> Any:
        return x / y

    def round(self, x: Any) -> Any:
        return _Through.apply(x, torch.round(x))

    def clip(self, x: Any, low: float, high: float) -> Any:
        # torch.clamp passes no gradient to what lies on a bound: the first and the last code, which are inside the range.
        return torch.where(x < low, low, torch.where(x > high, high, x))


OPS: Any = StraightThrough()


def fake_quantize(
    fmt: Format, w: torch.Tensor, group_size: int, scale: torch.Tensor, zero_point: torch.Tensor | None = None, half: bool = True
) -> torch.Tensor:
    """w [out, in] as the format stores it under these scales [out, groups, 1] and, where the format has them, real zero points of that shape,
    which are rounded and clipped to its codes; f32. Scales are stored as f16, or as f32 without `half`.

    Raises:
        OptionError: a format that is no integer one, or zero points that do not go with it.
    """
    check_trainable(fmt, zero_point is not None)
    codes, stored, zeros = stored_values(fmt, w, group_size, scale, zero_point, half)
    return torch.as_tensor(fmt.decode(OPS, codes, stored, zeros)).reshape(w.shape)


def stored_values(
    fmt: Format, w: torch.Tensor, group_size: int, scale: torch.Tensor, zero_point: torch.Tensor | None, half: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(codes [out, groups, size], scales and zero points [out, groups, 1] as they are stored) of what `fake_quantize` gives, all f32."""
    grouped = w.float().reshape(grouped_shape(tuple(w.shape), group_size))
    stored = _Through.apply(scale, scale.detach().half().float()) if half else scale
    zeros = None
    if zero_point is not None:
        zeros = OPS.clip(OPS.round(zero_point), 0.0, float(2**fmt.bits - 1))
    return torch.as_tensor(fmt.encode(OPS, grouped, stored, zeros)), stored, zeros


def check_trainable(fmt: Format, has_zero_point: bool) -> None:
    """
    Raises:
        OptionError: as `fake_quantize`.
    """
    if not isinstance(fmt, IntAsym | IntSym):
        raise OptionError(f"format {fmt.name}", "only integer formats are trained", "Use int4_asym, int4_sym, int8_asym or int8_sym")
    if has_zero_point != isinstance(fmt, IntAsym):
        reason = "it has zero points" if isinstance(fmt, IntAsym) else "it has no zero points"
        raise OptionError(f"format {fmt.name}", reason, "Give them with asymmetric formats, and with no others")
