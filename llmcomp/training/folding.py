"""Factors of folds, applied to a torch model: what feeds a layer is divided by what the layer's columns are multiplied by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmcomp.errors import ArchitectureError

Vector = NDArray[np.float32]
ROUNDING = 1e-3
"""Relative difference of logits up to which a model with folds computes what it did: sums of f32 in another order, through all layers."""


@dataclass(frozen=True)
class Folded:
    """Factors for the modules of a model, by their names."""

    columns: Mapping[str, Vector]
    """Module -> [in]: its weight's columns are multiplied by it."""
    rows: Mapping[str, Vector]
    """Module -> [out]: its weight's rows, and its bias, are multiplied by it then."""
    normed: Sequence[Sequence[str]]
    """Modules that read the same norm, whose output is to be divided by their columns' factors."""


def apply_folds(model: Any, folded: Folded) -> None:
    """Change the weights of `model` in place; it computes the same.

    Raises:
        ArchitectureError: what a norm's readers read comes from no norm with a weight, or the model does not compute the same.
    """
    ids = torch.arange(1, 9)[None] % model.config.get_text_config().vocab_size
    modules = dict(model.named_modules())
    with torch.no_grad():
        feeding = _feeding(model, ids, {names[0] for names in folded.normed})
        before = model(ids, use_cache=False).logits
        for names in folded.normed:
            norm = feeding.get(names[0])
            if norm is None:
                raise ArchitectureError(names[0], "no norm gives it its inputs, so its factors cannot be folded", "Start with --folds none")
            _divide_norm(norm, torch.from_numpy(folded.columns[names[0]]))
        for name, factors in folded.columns.items():
            weight = modules[name].weight
            weight.mul_(torch.from_numpy(factors)[:, None] if is_turned(modules[name]) else torch.from_numpy(factors))
        for name, factors in folded.rows.items():
            module, given = modules[name], torch.from_numpy(factors)
            module.weight.mul_(given if is_turned(module) else given[:, None])
            if getattr(module, "bias", None) is not None:
                module.bias.mul_(given)
        after = model(ids, use_cache=False).logits
    difference = float((after - before).abs().max() / before.abs().max())
    if not difference <= ROUNDING:
        raise ArchitectureError(
            f"architecture {model.config.model_type}", f"its folds change what it computes by {difference:.2g}", "Start with --folds none"
        )


def is_turned(module: Any) -> bool:
    """Whether a linear module holds (in, out)."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, Conv1D)


def _feeding(model: Any, ids: torch.Tensor, readers: set[str]) -> dict[str, Any]:
    """Reader -> the module with a vector for a weight whose output it reads."""
    outputs: list[tuple[torch.Tensor, Any]] = []
    found: dict[str, Any] = {}
    handles = []

    def after(module: Any, _: Any, output: Any) -> None:
        outputs.append((output, module))

    def reads(name: str) -> Any:
        def before(_: Any, inputs: Any) -> None:
            for output, module in outputs:
                if output.data_ptr() == inputs[0].data_ptr():
                    found[name] = module

        return before

    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if weight is not None and weight.ndim == 1:
            handles.append(module.register_forward_hook(after))
        if name in readers:
            handles.append(module.register_forward_pre_hook(reads(name)))
    try:
        model(ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _divide_norm(norm: Any, factors: torch.Tensor) -> None:
    """Some norms multiply by their weight, some by one more than it: which, a look at what it gives tells."""
    probe = torch.linspace(-1.0, 1.0, len(factors))[None, None].repeat(1, 2, 1)
    probe[:, 1] *= -0.5
    wanted = norm(probe) / factors
    weight = norm.weight.clone()
    for offset in (0.0, 1.0):
        norm.weight.copy_((weight + offset) / factors - offset)
        bias = getattr(norm, "bias", None)
        kept = None if bias is None else bias.clone()
        if bias is not None:
            bias.div_(factors)
        if torch.allclose(norm(probe), wanted, rtol=1e-4, atol=1e-5):
            return
        if bias is not None:
            bias.copy_(kept)
    raise ArchitectureError(type(norm).__name__, "its weight is no factor of its output", "Start with --folds none")
