"""A trained model made plain: adapters, masks and learned ranges become weights, codes and torch's own operations, which exporters know."""

from __future__ import annotations

from copy import deepcopy

from torch import nn
from torch.nn.utils import parametrize

from llmcomp.options.modes import StripFormat
from llmcomp.training.absorbing import absorb
from llmcomp.training.masks import BinaryMask, TrainableMask
from llmcomp.training.quantizers import ACTIVATION, FixedQuantizer, RangeQuantizer
from llmcomp.training.weights import parametrizations


def strip(model: nn.Module, do_copy: bool = True, strip_format: StripFormat = StripFormat.NATIVE) -> nn.Module:
    """The model in evaluation mode, computing what the trained one does, to a rounding. Adapters vanish into the codes of their weights, which are left as
    `strip_format` says; fallen weights are zero; learned ranges of weights and inputs are read through `torch.fake_quantize_*`, whatever the format.
    `openvino.convert_model` turns these into FakeQuantize, torch.onnx.export (dynamo=False, opset 13 or later, with the package onnx) into QuantizeLinear
    and DequantizeLinear. Foreign parametrizations of the same weight become part of its values.

    Raises:
        OptionError: DQ of codes whose width does not fill a byte.
    """
    model = (deepcopy(model) if do_copy else model).eval()
    absorb(model, StripFormat(strip_format))
    for weight, _ in list(parametrizations(model, (BinaryMask, TrainableMask, RangeQuantizer))):
        quantizer = weight.find(RangeQuantizer)
        for module, attribute in weight.owners:
            parametrize.remove_parametrizations(module, attribute, leave_parametrized=True)
        if quantizer is not None:
            weight.add(quantizer.fixed())
    # One fixed quantizer for each learned one: an input that several layers share stays shared.
    fixed: dict[int, FixedQuantizer] = {}
    for module in model.modules():
        quantizer = getattr(module, ACTIVATION, None)
        if isinstance(quantizer, RangeQuantizer):
            setattr(module, ACTIVATION, fixed.setdefault(id(quantizer), quantizer.fixed()))
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = None
    return model
