"""The whole way on handwritten digits: train, prune by a schedule, quantize, export, and lose nothing that matters."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import numpy as np
import openvino as ov
import torch
from sklearn.datasets import load_digits
from torch import nn

from llmcomp import PruneMode, batch_norm_adaptation, prune, pruning_statistic
from llmcomp.training.prune_schedules import ExponentialMagnitudePruningScheduler
from llmcomp.training.qat import prepare
from llmcomp.training.strip import strip
from tests.training.runtime import layer_types

MODE, RATIO = PruneMode.UNSTRUCTURED_MAGNITUDE_GLOBAL, 0.7


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, test = order[:1297], order[1297:]
    return x[train], y[train], x[test], y[test]


def network() -> nn.Sequential:
    # Pixels are unfolded to four channels: the CPU plugin runs a first convolution of one channel in floating point.
    return nn.Sequential(
        *(nn.PixelUnshuffle(2), nn.Conv2d(4, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(32 * 16, 10)),
    )


def epoch(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    model.train()
    for rows in torch.randperm(len(y)).split(64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    model.eval()


def accuracy(logits: np.ndarray, y: torch.Tensor) -> float:
    return float((logits.argmax(1) == y.numpy()).mean())


def test_digits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, y, x_test, y_test = data()
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(8):
        epoch(model, optimizer, x, y)
    with torch.no_grad():
        dense = accuracy(model(x_test).numpy(), y_test)
    assert dense > 0.96

    prune(model, MODE, ratio=0.0)
    schedule = ExponentialMagnitudePruningScheduler(model, mode=MODE, initial_ratio=0.2, target_ratio=RATIO, target_epoch=3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(5):
        schedule.step()
        epoch(model, optimizer, x, y)
    masked = sum(model[i].weight.numel() for i in (1, 4, 8))
    statistic = pruning_statistic(model)
    assert round(statistic.pruning_ratio * masked) == int(RATIO * masked)
    batch_norm_adaptation(model, x.split(128))

    prepare(model, x[:64], x.split(64))
    start = deepcopy(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    for _ in range(2):
        epoch(model, optimizer, x, y)
    assert not torch.equal(start["8.input_quantizer.scale"], model.state_dict()["8.input_quantizer.scale"])

    plain = strip(model)
    ov.save_model(ov.convert_model(plain, example_input=x_test), tmp_path / "digits.xml", compress_to_fp16=False)
    saved = ov.Core().read_model(tmp_path / "digits.xml")
    logits, types = layer_types(saved, x_test.numpy())
    assert sorted(types) == [("Convolution", True), ("Convolution", True), ("FullyConnected", True)]
    codes = [node.data for node in saved.get_ops() if node.get_type_name() == "Constant" and node.get_element_type() == ov.Type.i8]
    codes = [c for c in codes if c.size > 1000]
    assert sum(c.size for c in codes) == masked
    # What rounds to zero adds to what has fallen.
    sparsity = sum(int((c == 0).sum()) for c in codes) / masked
    assert RATIO - 1 / masked <= sparsity < RATIO + 0.05

    small = accuracy(logits, y_test)
    print(f"accuracy: float {dense:.4f}, 70 % zero and int8 in OpenVINO {small:.4f}; zeros in the file {sparsity:.4f}")
    assert small >= dense - 0.01
