"""Quantization-aware training to 8 bits of models whose work is done by convolutions and linear layers.

    model = prepare(model, example_inputs, calibration_dataset)   # quantizers with ranges from data
    ...                                                            # train as before
    plain = strip(model)                                           # strip.py: exports to OpenVINO and ONNX

Quantized are the weights of Linear and convolution layers, one symmetric range per output channel, and the input of each, one range per tensor: what
OpenVINO's CPU plugin needs to run the layer on bytes. Layers that see the same tensor share its quantizer; an embedding that is tied to
a layer is rounded with it. Batch normalization is kept, not folded: a factor
per output channel commutes with ranges per output channel, so folding after training (the runtime does it) changes no code, and in training the
statistics stay alive.

Products of two activations, as in attention, stay float. Of a convolution with one input channel the CPU plugin (2026.4) makes no byte arithmetic, and in
bf16, the default on processors that have it, it fails to compile one before a quantized layer, whoever quantized it: put it into the ignored scope,
or compile with INFERENCE_PRECISION_HINT f32.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn

from llmcomp.errors import CalibrationError, OptionError
from llmcomp.options import IgnoredScope
from llmcomp.options.modes import QuantizationPreset
from llmcomp.training.feeding import feed, items
from llmcomp.training.quantizers import ACTIVATION, RangeQuantizer, asymmetric, symmetric, weight_quantizer
from llmcomp.training.weights import CONVOLUTIONS, TRANSPOSED, Weight, check_finite, evaluating, find_weights, kept

RangeEstimator = Literal["mean_minmax", "minmax"]
LAYERS = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)


def prepare(
    model: nn.Module,
    example_inputs: Any,
    calibration_dataset: Iterable[Any],
    ignored_scope: IgnoredScope | None = None,
    preset: QuantizationPreset = QuantizationPreset.PERFORMANCE,
    *,
    range_estimator: RangeEstimator = "mean_minmax",
    subset_size: int = 300,
) -> nn.Module:
    """The model itself with quantizers on weights and inputs of its layers, their ranges from the data; masks of `prune` stay, below the rounding.

    Args:
        example_inputs: one run tells which layers share an input; a layer that it does not call stays float.
        calibration_dataset: at most `subset_size` items, fed as `example_inputs`: a mapping by keyword, a tuple by position.
        range_estimator: mean over the items of each one's extremes, or the extremes of all.

    Raises:
        OptionError: the model has quantizers already, no layer is called, or a word that is none.
        RuleError: an ignored scope that names nothing, or everything.
        CalibrationError: no data, or data with NaN or Inf in an activation.
        NonFiniteWeightError: NaN or Inf in a weight.
    """
    preset = parse_preset(preset)
    if range_estimator not in ("mean_minmax", "minmax"):
        raise OptionError("range_estimator", f"{range_estimator!r} is none", "Use mean_minmax or minmax")
    if subset_size < 1:
        raise OptionError("subset_size", f"{subset_size!r} is below 1", "Give the number of items to take ranges from")
    if any(isinstance(module, RangeQuantizer) for module in model.modules()):
        raise OptionError("model", "it has quantizers already", "Prepare a model once; load the state of a trained one into it")
    weights = kept(
        [weight for weight in find_weights(model) if any(isinstance(module, LAYERS) for module, _ in weight.owners)], ignored_scope
    )
    check_finite(weights)
    layers = {module: weight for weight in weights for module, _ in weight.owners if isinstance(module, LAYERS)}
    sites = shared_inputs(model, list(layers), example_inputs)
    if not sites:
        raise OptionError(
            "example_inputs", "a run on them calls no layer that is to be quantized", "Give inputs that use the model's layers"
        )
    bounds = observe(model, sites, calibration_dataset, range_estimator, subset_size)

    make = symmetric if preset is QuantizationPreset.PERFORMANCE else asymmetric
    done: set[str] = set()
    for site, (low, high) in zip(sites, bounds, strict=True):
        quantizer = make(low, high)
        for module in site:
            module.add_module(ACTIVATION, quantizer)
            module.register_forward_pre_hook(quantize_input, with_kwargs=True)
            weight = layers[module]
            if weight.name not in done:
                done.add(weight.name)
                _quantize_weight(weight)
    return model


def _quantize_weight(weight: Weight) -> None:
    module, attribute = weight.owners[0]
    # What is read now: with the masks that are on it.
    weight.add(weight_quantizer(getattr(module, attribute), 1 if isinstance(module, TRANSPOSED) else 0))


def parse_preset(preset: QuantizationPreset | str) -> QuantizationPreset:
    """
    Raises:
        OptionError: no such preset.
    """
    try:
        return QuantizationPreset(preset)
    except ValueError:
        known = ", ".join(f"QuantizationPreset.{p.name}" for p in QuantizationPreset)
        raise OptionError("preset", f"{preset!r} is none", f"Use one of {known}") from None


def quantize_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook: the layer gets its input rounded."""
    quantizer = getattr(module, ACTIVATION)
    if args:
        return (quantizer(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "input": quantizer(kwargs["input"])}


def shared_inputs(model: nn.Module, layers: list[nn.Module], example_inputs: Any) -> list[list[nn.Module]]:
    """The layers that a run calls, in groups that see the same tensors in all their calls, in the order of the run."""
    seen: dict[nn.Module, list[tuple[int, int]]] = {}
    # Held to the end of the run, lest another tensor get the place and so the id of one that is gone.
    held: list[torch.Tensor] = []

    def note(module: nn.Module, x: torch.Tensor) -> None:
        held.append(x)
        # An operation in place makes another value of the same tensor.
        seen.setdefault(module, []).append((id(x), x._version))

    _run_watched(model, layers, note, [example_inputs])
    groups: dict[tuple[tuple[int, int], ...], list[nn.Module]] = {}
    for module, calls in seen.items():
        groups.setdefault(tuple(calls), []).append(module)
    return list(groups.values())


def observe(
    model: nn.Module, sites: list[list[nn.Module]], dataset: Iterable[Any], estimator: RangeEstimator, subset_size: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each site the lower and the upper bound of its input over the data.

    Raises:
        CalibrationError: no data, NaN or Inf in an activation, or a site that the data never reach.
    """
    first = [site[0] for site in sites]
    extremes: dict[nn.Module, list[tuple[float, float]]] = {module: [] for module in first}

    def note(module: nn.Module, x: torch.Tensor) -> None:
        low, high = x.aminmax()
        extremes[module].append((float(low), float(high)))

    _run_watched(model, first, note, items(dataset, subset_size))
    bounds = []
    for module in first:
        pairs = torch.tensor(extremes[module], dtype=torch.float64)
        name = next(name for name, other in model.named_modules() if other is module)
        if not len(pairs):
            raise CalibrationError(f"layer {name}", "the data never reach it", "Give data that do, or put it into the ignored scope")
        if not torch.isfinite(pairs).all():
            raise CalibrationError(f"layer {name}", "NaN or Inf in its input", "Look for the item that makes it; the weights are finite")
        low, high = (pairs[:, 0].mean(), pairs[:, 1].mean()) if estimator == "mean_minmax" else (pairs[:, 0].min(), pairs[:, 1].max())
        device = next(module.parameters()).device
        bounds.append((low.float().reshape(1).to(device), high.float().reshape(1).to(device)))
    return bounds


def _run_watched(model: nn.Module, layers: list[nn.Module], note: Any, data: Iterable[Any]) -> None:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        note(module, args[0] if args else kwargs["input"])

    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in layers]
    try:
        with evaluating(model), torch.no_grad():
            for item in data:
                feed(model, item)
    finally:
        for handle in handles:
            handle.remove()
