"""A trained model made plain: masks and learned ranges become weights and torch's own operations, which exporters know."""

from __future__ import annotations

from copy import deepcopy

from torch import nn
from torch.nn.utils import parametrize

from llmcomp.training.masks import BinaryMask, TrainableMask
from llmcomp.training.quantizers import ACTIVATION, FixedQuantizer, RangeQuantizer
from llmcomp.training.weights import parametrizations


def strip(model: nn.Module, do_copy: bool = True) -> nn.Module:
    """The model in evaluation mode: fallen weights are zero, rounded weights lie on their grid and are read through `torch.fake_quantize_*`,
    as are the inputs that had a quantizer. `openvino.convert_model` turns these into FakeQuantize, torch.onnx.export (dynamo=False, opset 13
    or later, with the package onnx) into QuantizeLinear and DequantizeLinear. Foreign parametrizations of the same weight become part of its values.
    """
    model = (deepcopy(model) if do_copy else model).eval()
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
