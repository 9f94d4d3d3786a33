"""What is left of a trained model without its adapters: weights that are rounded once, in one of three forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn.utils import parametrize

from llmcomp import formats
from llmcomp.errors import OptionError
from llmcomp.formats import CompressedWeight
from llmcomp.options.modes import StripFormat
from llmcomp.training.quantized import PARAMETRIZED, FakeQuantizedWeight, original, quantized_weights


class NativeWeight(torch.nn.Module):  # type: ignore[misc]
    """The weight through `torch.fake_quantize_per_channel_affine`, each group a channel."""

    def __init__(self, weight: CompressedWeight, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed
        bits, zeros = weight.format.bits, weight.zero_point
        self.groups = weight.scale.size
        self.low: int
        self.high: int
        self.low, self.high = (0, 2**bits - 1) if zeros is not None else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        scale = torch.from_numpy(weight.scale.astype(np.float32).reshape(-1))
        # torch wants steps above zero: the sign of a signed scale is taken into the weight and out again.
        self.register_buffer("sign", torch.where(scale < 0, -1.0, 1.0)[:, None])
        self.register_buffer("scale", scale.abs())
        points = np.zeros(self.groups) if zeros is None else zeros.reshape(-1)
        self.register_buffer("zero_point", torch.from_numpy(points.astype(np.int32)))

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        shape = w.T.shape if self.transposed else w.shape
        rows = (w.T if self.transposed else w).float().reshape(self.groups, -1) * self.sign
        found = torch.fake_quantize_per_channel_affine(rows, self.scale, self.zero_point, 0, self.low, self.high) * self.sign
        found = found.reshape(shape).to(w.dtype)
        return found.T if self.transposed else found


class PackedWeight(torch.nn.Module):  # type: ignore[misc]
    """Bytes of codes, the lowest bits first -> the weight."""

    def __init__(self, weight: CompressedWeight, transposed: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.format, self.shape, self.group_size = weight.format, weight.shape, weight.group_size
        self.transposed, self.dtype = transposed, dtype
        self.register_buffer("scale", torch.from_numpy(np.array(weight.scale)))
        zeros = weight.zero_point
        self.register_buffer("zero_point", None if zeros is None else torch.from_numpy(np.array(zeros)))

    def forward(self, packed: torch.Tensor) -> torch.Tensor:
        grouped = formats.grouped_shape(self.shape, self.group_size)
        codes = _unpacked(packed, self.format.bits, self.format.code_type).reshape(grouped).float()
        zeros = self.zero_point
        levels = codes - (zeros.float() if zeros is not None else getattr(self.format, "offset", 0.0))
        found = (levels * self.scale.float()).reshape(self.shape).to(self.dtype)
        return found.T if self.transposed else found


def _unpacked(packed: torch.Tensor, bits: int, code_type: str) -> torch.Tensor:
    """[bytes] -> one code per item; signed ones are two's complement."""
    per_byte = 8 // bits
    shifts = torch.arange(per_byte, dtype=torch.uint8, device=packed.device) * bits
    codes = ((packed[:, None] >> shifts) & (2**bits - 1)).reshape(-1).to(torch.int16)
    return codes if code_type.startswith("u") else torch.where(codes >= 2 ** (bits - 1), codes - 2**bits, codes)


def absorb(model: Any, strip_format: StripFormat) -> Any:
    """`model`, changed in place: no weight has an adapter any more, and each is what the trained model computed with.

    Raises:
        OptionError: packed codes of a width that does not fill a byte.
    """
    found = list(quantized_weights(model))
    if strip_format is StripFormat.DQ:
        for name, _, one in found:
            if 8 % one.format.bits:
                raise OptionError(f"{name}: {one.format.name}", "its codes do not fill bytes", "Strip it in place")
    done: dict[int, Stripped] = {}
    for _, module, one in found:
        # Tied modules share one parametrization, and what is left of it.
        if id(one) not in done:
            done[id(one)] = _stripped(original(module), one, strip_format)
        parametrize.remove_parametrizations(module, PARAMETRIZED, leave_parametrized=False)
        stored, reader = done[id(one)]
        del module._parameters[PARAMETRIZED]
        if isinstance(stored, torch.nn.Parameter):
            module.register_parameter(PARAMETRIZED, stored)
        else:
            module.register_buffer(PARAMETRIZED, stored)
        if reader is not None:
            parametrize.register_parametrization(module, PARAMETRIZED, reader, unsafe=True)
    return model


Stripped = tuple[torch.Tensor, torch.nn.Module | None]
"""What a module stores, and what gives the weight of it; None where that is the weight."""


@torch.no_grad()  # type: ignore[untyped-decorator]
def _stripped(under: torch.Tensor, one: FakeQuantizedWeight, strip_format: StripFormat) -> Stripped:
    weight = one.compressed(under)
    if strip_format is StripFormat.DQ:
        return torch.from_numpy(np.array(weight.packed()["codes"])), PackedWeight(weight, one.transposed, under.dtype)
    in_place = strip_format is StripFormat.IN_PLACE
    kept = torch.from_numpy(weight.dequantize()) if in_place else one.latent(under)
    parameter = torch.nn.Parameter((kept.T if one.transposed else kept).to(under.dtype).contiguous(), requires_grad=False)
    return parameter, None if in_place else NativeWeight(weight, one.transposed)
