"""Running statistics of batch normalization, taken anew after the weights in front of it have changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from llmcomp.errors import OptionError
from llmcomp.training.feeding import feed, items
from llmcomp.training.weights import evaluating


def batch_norm_adaptation(model: nn.Module, calibration_dataset: Iterable[Any], *, num_iterations: int | None = None) -> nn.Module:
    """The model itself, its batch normalizations' statistics the mean over these batches of each batch's mean and unbiased variance.

    NNCF lets the old statistics fade with the layer's momentum; here they are forgotten at once, so a few batches are enough and the order
    does not matter. Everything else stays as it is in evaluation, dropout too. `num_iterations` None: the whole data set.

    Raises:
        OptionError: no batch normalization with running statistics, or less than one iteration.
        CalibrationError: no data.
    """
    if num_iterations is not None and num_iterations < 1:
        raise OptionError("num_iterations", f"{num_iterations!r} is below 1", "Give the number of batches, or None for all")
    layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None]
    if not layers:
        raise OptionError("model", "it has no batch normalization with running statistics", "Leave the adaptation out")
    momenta = [layer.momentum for layer in layers]
    with evaluating(model), torch.no_grad():
        try:
            for number, item in enumerate(items(calibration_dataset, num_iterations)):
                for layer in layers:
                    if number == 0:
                        layer.reset_running_stats()
                    layer.training, layer.momentum = True, None
                feed(model, item)
        finally:
            for layer, momentum in zip(layers, momenta, strict=True):
                layer.momentum = momentum
    return model
