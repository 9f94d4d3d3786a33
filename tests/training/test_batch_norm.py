"""Running statistics are the means over the batches, in float64 by hand; nothing else moves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from llmcomp import batch_norm_adaptation
from llmcomp.errors import CalibrationError, OptionError


def test_statistics_are_taken_anew() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3, momentum=0.1), nn.Dropout(0.5), nn.Linear(3, 2))
    model[0].running_mean.fill_(7.0)
    model.train()
    model[1].eval()
    data = [torch.randn(8, 3) * (i + 1) + i for i in range(4)]
    assert batch_norm_adaptation(model, iter(data), num_iterations=3) is model
    exact = np.stack([x.numpy().astype(np.float64) for x in data[:3]])
    # Running means in f32.
    np.testing.assert_allclose(model[0].running_mean.numpy(), exact.mean(1).mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model[0].running_var.numpy(), exact.var(1, ddof=1).mean(0), rtol=1e-5)
    assert model[0].momentum == 0.1 and [m.training for m in model] == [True, False, True]


def test_refusals() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    with pytest.raises(CalibrationError, match="empty"):
        batch_norm_adaptation(model, [])
    with pytest.raises(OptionError, match="below 1"):
        batch_norm_adaptation(model, [torch.ones(2, 3)], num_iterations=0)
    with pytest.raises(OptionError, match="no batch normalization"):
        batch_norm_adaptation(nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)), [torch.ones(2, 3)])
