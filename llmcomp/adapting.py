"""The low-rank correction of one compressed layer, as it will be stored.

comes in: a weight with its factors in it, what rounding has made of it, the second moments of its inputs, a Scheme
goes out: A and B in the scheme's format, zeros where they would not help
may import: algorithms, formats, planning, solving
read first: correct
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmcomp import formats
from llmcomp.algorithms.awq import quadratic_loss
from llmcomp.algorithms.lora_correction import lora_correction
from llmcomp.formats import CompressedWeight
from llmcomp.planning import FLOATS, Scheme
from llmcomp.solving import TINY, Moments

Stored = CompressedWeight | NDArray[np.float16]


@dataclass(frozen=True)
class Correction:
    """B A, added to what the layer's own weight gives."""

    adapters: tuple[Stored, Stored]
    """A [rank, in] and B [out, rank], with f32 scales."""
    product: NDArray[np.float32]
    """[out, in]: what they add, as they are stored."""
    loss: float
    """Of the corrected layer's outputs, relative to their power."""
    helps: bool
    """Otherwise they are zeros."""


def correct(scheme: Scheme, w: NDArray[np.float32], rounded: NDArray[np.float32], moments: Moments) -> Correction:
    """The correction of `rounded` [out, in] to w. It is kept if the loss falls with A and B rounded as they are stored."""
    power = max(float(quadratic_loss(w, moments.hessian).sum()), TINY)
    before = float(quadratic_loss(rounded - w, moments.hessian).sum())
    adapters = lora_correction(w, rounded, moments.hessian, scheme.adapter_rank)
    a, b = (_store(scheme.adapter_format, x) for x in adapters)
    with np.errstate(over="ignore", invalid="ignore"):
        product = _load(b) @ _load(a)
        after = float(quadratic_loss(rounded + product - w, moments.hessian).sum())
    if after < before:
        return Correction((a, b), product, after / power, True)
    nothing = [_store(scheme.adapter_format, np.zeros_like(x)) for x in adapters]
    return Correction((nothing[0], nothing[1]), np.zeros_like(w), before / power, False)


def _store(name: str, x: NDArray[np.float32]) -> Stored:
    with np.errstate(over="ignore"):  # Beyond f16 the loss is no number, and zeros are stored.
        return x.astype(np.float16) if name in FLOATS else formats.quantize(formats.get(name), x, -1)


def _load(x: Stored) -> NDArray[np.float32]:
    return x.astype(np.float32) if isinstance(x, np.ndarray) else x.stored().dequantize()
