"""Weights of torch modules that are rounded in every forward pass: parametrizations, with or without a low-rank adapter that vanishes into the codes.

The weight that a module sees is FQ(W + B A) (FQ_LORA; without adapters FQ, where W itself is trained). It starts as exactly the compressed weight: W is
the float weight, held within `MARGIN` steps of what the start stands for, and B is zero.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from llmcomp import formats
from llmcomp.errors import OptionError
from llmcomp.formats import CompressedWeight
from llmcomp.training.fake_quantize import check_trainable, fake_quantize, stored_values

MARGIN = 0.49
"""Steps that a float weight may be off its level at the start: half a step is where it would round to another."""
PARAMETRIZED = "weight"


@dataclass(frozen=True)
class Start:
    """Where the training of one weight begins."""

    weight: CompressedWeight
    """[out, in]; its scale is taken as it is stored."""
    transposed: bool = False
    """The module holds the weight as (in, out)."""


class FakeQuantizedWeight(torch.nn.Module):  # type: ignore[misc]
    """w [out, in] -> FQ(w + B A), f32 in w's own shape."""

    lora_A: torch.nn.Parameter | None
    """[rank, in]"""
    lora_B: torch.nn.Parameter | None
    """[out, rank]"""
    gain: torch.nn.Parameter
    zero_point: torch.nn.Parameter | None
    """[out, groups, 1], real; it is rounded where it is used."""

    def __init__(self, start: Start, rank: int = 0, seed: int = 0, frozen: bool = False) -> None:
        """`frozen`: the codes stay, whatever the scales become.

        Raises:
            OptionError: a format that is not trained, or a rank that is larger than a side of the weight.
        """
        super().__init__()
        weight = start.weight.stored()
        check_trainable(weight.format, weight.zero_point is not None)
        check_rank(rank, weight.shape)
        self.format, self.group_size, self.transposed, self.frozen = weight.format, weight.group_size, start.transposed, frozen
        self.register_buffer("first_scale", torch.from_numpy(weight.scale.astype(np.float32)))
        self.gain = torch.nn.Parameter(torch.ones_like(self.first_scale))
        self.half = weight.scale_type == "f16"
        self.shape = weight.shape
        zeros = weight.zero_point
        self.zero_point = None if zeros is None else torch.nn.Parameter(torch.from_numpy(zeros.astype(np.float32)))
        self.lora_A = self.lora_B = None
        self.active = rank
        """Leading ranks of the adapter that are in use."""
        if rank:
            rows, columns = weight.shape
            drawn = torch.empty(rank, columns)
            # Kaiming's uniform bound, as PEFT initialises A; B is zero, so that the first step is the start.
            bound = 1.0 / math.sqrt(columns)
            drawn.uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))
            self.lora_A, self.lora_B = torch.nn.Parameter(drawn), torch.nn.Parameter(torch.zeros(rows, rank))

    @property
    def scale(self) -> torch.Tensor:
        """[out, groups, 1]. What is trained is its ratio to the first one, so that one learning rate suits all."""
        return self.first_scale * self.gain

    @property
    def rank(self) -> int:
        return 0 if self.lora_A is None else len(self.lora_A)

    def latent(self, w: torch.Tensor) -> torch.Tensor:
        """What is rounded, (out, in) f32."""
        w = (w.T if self.transposed else w).float()
        if self.frozen:
            # A weight is its level times the first scale, to a rounding.
            grouped = w.reshape(formats.grouped_shape(tuple(w.shape), self.group_size))
            return (torch.round(grouped / self.first_scale) * self.scale).reshape(w.shape)
        if self.lora_A is None or self.lora_B is None:
            return w
        # With no rank in use too: several processes wait for the gradients of all parameters, which are zeros then.
        return torch.addmm(w, self.lora_B[:, : self.active], self.lora_A[: self.active])

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        quantize = compiled() if self.gain.requires_grad and torch.is_grad_enabled() else fake_quantize
        # Parametrized modules hold their own dtype; what a format decodes is f32.
        found = quantize(self.format, self.latent(w), self.group_size, self.scale, self.zero_point, self.half).to(w.dtype)
        return found.T if self.transposed else found

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def compressed(self, w: torch.Tensor) -> CompressedWeight:
        """The codes, scale and zero point that the forward pass rounds to."""
        latent = self.latent(w)
        codes, scale, zeros = stored_values(self.format, latent, self.group_size, self.scale, self.zero_point, self.half)
        kind = np.float16 if self.half else np.float32
        unsigned = self.format.code_type.startswith("u")
        return CompressedWeight(
            self.format,
            tuple(latent.shape),
            self.group_size,
            codes.numpy().astype(np.uint8 if unsigned else np.int8),
            scale.numpy().astype(kind),
            None if zeros is None else zeros.numpy().astype(np.uint8),
        )


def check_rank(rank: int, shape: Sequence[int], name: str = "") -> None:
    """
    Raises:
        OptionError: an adapter of a rank below zero, or above both what the weight can hold.
    """
    if not 0 <= rank <= min(shape):
        raise OptionError(
            f"rank {rank}" + (f" for {name}" if name else ""),
            f"a weight of {' x '.join(map(str, shape))} has ranks from 0 to {min(shape)}",
            "Give a smaller rank",
        )


@cache
def compiled() -> Callable[..., torch.Tensor]:
    """`fake_quantize`, compiled where a C++ compiler is at hand (for a GPU Triton is part of torch), else itself."""
    if torch.cuda.is_available() or any(map(shutil.which, ("c++", "g++", "clang++", "cl"))):
        return torch.compile(fake_quantize, dynamic=False)
    return fake_quantize


def quantize_weight(
    modules: Sequence[torch.nn.Module], start: Start, rank: int = 0, trains_weight: bool = False, frozen: bool = False, seed: int = 0
) -> FakeQuantizedWeight:
    """Put one parametrization on the weight of `modules`, which are tied if they are several. Its values stay those of `start`, exactly.

    Raises:
        OptionError: as FakeQuantizedWeight.
    """
    parametrization = FakeQuantizedWeight(start, rank, seed, frozen)
    weight = modules[0].weight
    assert all(module.weight is weight for module in modules)
    with torch.no_grad():
        rows = weight.T if start.transposed else weight
        for run, tile in start.weight.stored().tiles():
            rows[run].copy_(torch.from_numpy(tile.dequantize()) if frozen else hold(rows[run].float(), tile))
    weight.requires_grad_(trains_weight)
    for module in modules:
        parametrize.register_parametrization(module, PARAMETRIZED, parametrization, unsafe=True)
    return parametrization


def hold(w: torch.Tensor, start: CompressedWeight) -> torch.Tensor:
    """`w` [out, in], each weight within MARGIN steps of the level that `start` has for it."""
    level = torch.from_numpy(start.dequantize())
    step = torch.from_numpy(np.abs(start.scale.astype(np.float32)))
    room = (MARGIN * step).expand(formats.grouped_shape(start.shape, start.group_size)).reshape(start.shape)
    return level + torch.minimum(torch.maximum(w - level, -room), room)


@contextmanager
def recomputing(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """What these modules compute with is made again in the backward pass instead of being kept for it: the rounded weight and what its gradients need are
    twice the weight's bytes. torch stops as soon as it has what the product saved, so that no product is computed twice."""
    try:
        for module in modules:
            module.forward = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)
        yield
    finally:
        for module in modules:
            module.__dict__.pop("forward", None)


def quantized_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, FakeQuantizedWeight]]:
    """(module's name, module, its parametrization), each module once."""
    for name, module in model.named_modules():
        if parametrize.is_parametrized(module, PARAMETRIZED):
            for one in module.parametrizations[PARAMETRIZED]:
                if isinstance(one, FakeQuantizedWeight):
                    yield name, module, one


def adapted(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module, FakeQuantizedWeight]]:
    """(module's name, module, what has its adapter); of tied modules the first, since merging changes all of them."""
    found: dict[int, tuple[str, torch.nn.Module, FakeQuantizedWeight]] = {}
    for name, module, one in quantized_weights(model):
        if one.lora_A is not None:
            found.setdefault(id(one), (name, module, one))
    return list(found.values())


def original(module: torch.nn.Module) -> torch.Tensor:
    """The weight under the parametrization."""
    return module.parametrizations[PARAMETRIZED].original
