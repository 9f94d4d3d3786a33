"""What gets a quantizer, its start, training, and the plain model: the same values in torch and in OpenVINO, whose layers run on bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import openvino as ov
import pytest
import torch
from torch import nn

from llmcomp import PruneMode, prune
from llmcomp.errors import CalibrationError, NonFiniteWeightError, OptionError, RuleError
from llmcomp.options import IgnoredScope, QuantizationPreset
from llmcomp.training.qat import prepare
from llmcomp.training.quantizers import AsymmetricQuantizer, FixedQuantizer, SymmetricQuantizer
from llmcomp.training.strip import strip
from tests.training.runtime import layer_types

PRESETS = tuple(QuantizationPreset)


class Attention(nn.Module):
    """One pre-norm transformer block and a head that shares its weight with the table."""

    def __init__(self, dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = heads
        self.table = nn.Embedding(11, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.unused = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o((torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, -1) @ v).transpose(1, 2).flatten(2))
        x = x + self.down(torch.relu(self.up(self.norm2(x))))
        return self.head(x)


IDS = torch.arange(20).reshape(4, 5) % 11


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)),
        *(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.ReLU()),
        *(nn.ConvTranspose2d(16, 8, 2, stride=2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(8 * 16 * 16, 10)),
    ).eval()


def images(count: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(2, 3, 8, 8) for _ in range(count)]


def test_layers_that_share_an_input_share_its_quantizer() -> None:
    model = prepare(Attention(), IDS, [IDS])
    assert model.q.input_quantizer is model.k.input_quantizer is model.v.input_quantizer
    quantizers = {id(m.input_quantizer) for m in model.modules() if hasattr(m, "input_quantizer")}
    assert len(quantizers) == 5
    assert not hasattr(model.unused, "input_quantizer") and not hasattr(model.unused, "parametrizations")
    assert model.down.input_quantizer.codes() == (0, 255) and model.up.input_quantizer.codes() == (-128, 127)
    assert torch.equal(model.head.weight, model.table.weight)


def test_ranges_start_from_the_data() -> None:
    data = images()
    low, high = np.array([float(x.min()) for x in data]), np.array([float(x.max()) for x in data])
    first = prepare(convolutions(), data[0], data)[0]
    assert isinstance(first.input_quantizer, SymmetricQuantizer)
    # f32 of a float64 mean.
    assert float(first.input_quantizer.scale) == pytest.approx(max(-low.mean(), high.mean()), rel=1e-6)
    widest = prepare(convolutions(), data[0], data, range_estimator="minmax")[0]
    assert float(widest.input_quantizer.scale) == pytest.approx(max(-low.min(), high.max()), rel=1e-6)
    two = prepare(convolutions(), data[0], data, preset=QuantizationPreset.MIXED, subset_size=2)[0].input_quantizer
    assert isinstance(two, AsymmetricQuantizer)
    # Zero on the grid widens by half a step of 255 at most.
    assert float(two.input_low) == pytest.approx(low[:2].mean(), rel=0.01)
    w = first.parametrizations.weight.original
    np.testing.assert_array_equal(first.parametrizations.weight[0].scale.flatten().tolist(), w.detach().abs().amax((1, 2, 3)).tolist())


@pytest.mark.parametrize("preset", PRESETS)
def test_convolutions_run_on_bytes(preset: QuantizationPreset) -> None:
    data = images()
    model = prepare(convolutions(), data[0], data, preset=preset)
    wanted = model(data[0]).detach()
    plain = strip(model)
    assert torch.equal(plain(data[0]), wanted)
    assert not any(isinstance(m, SymmetricQuantizer | AsymmetricQuantizer) for m in plain.modules())
    found, types = layer_types(ov.convert_model(plain, example_input=data[0]), data[0].numpy())
    # Another order of f32 operations moves a value over a rounding's edge here and there: two steps of the last layer's input times a weight.
    np.testing.assert_allclose(found, wanted.numpy(), atol=0.01 * float(wanted.abs().max()))
    assert [kind for kind, byte in types if not byte] == []
    assert sorted(kind for kind, _ in types) == ["Convolution", "Convolution", "Deconvolution", "FullyConnected"]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_transformers_matrices_run_on_bytes(preset: QuantizationPreset) -> None:
    model = prepare(Attention().eval(), IDS, [IDS], preset=preset)
    wanted = model(IDS).detach()
    plain = strip(model)
    torch.testing.assert_close(plain(IDS), wanted, rtol=0, atol=0)
    found, types = layer_types(ov.convert_model(plain, example_input=IDS), IDS.numpy())
    np.testing.assert_allclose(found, wanted.numpy(), atol=0.02 * float(wanted.abs().max()))
    assert [byte for kind, byte in types if kind == "FullyConnected"] == [True] * 7


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    ("make", "data"), [(convolutions, torch.linspace(-1, 1, 384).reshape(2, 3, 8, 8)), (lambda: Attention().eval(), IDS)]
)
def test_onnx_in_its_own_runtime(tmp_path: Path, preset: QuantizationPreset, make: Any, data: torch.Tensor) -> None:
    plain = strip(prepare(make(), data, [data], preset=preset))
    wanted = plain(data).detach().numpy()
    torch.onnx.export(plain, (data,), tmp_path / "model.onnx", dynamo=False, input_names=["x"], output_names=["y"])
    types = [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node]
    assert types.count("QuantizeLinear") == types.count("DequantizeLinear") > 0
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(["y"], {"x": data.numpy()})
    # As in OpenVINO: a value on a rounding's edge goes the other way here and there.
    np.testing.assert_allclose(found, wanted, atol=0.02 * float(np.abs(wanted).max()))


def test_training_moves_ranges_and_weights_and_state_comes_back() -> None:
    data = images()
    model = prepare(convolutions(), data[0], data)
    # Far enough from the start that rounding is not what is left to learn.
    goals = [torch.randn(2, 10) for _ in data]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = sum(((model(x) - goal) ** 2).mean() for x, goal in zip(data, goals, strict=True))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    assert all(not torch.equal(p, before[n]) for n, p in model.named_parameters())
    other = prepare(convolutions(), data[0], data[:1])
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(data[0]), model(data[0]))


def test_masks_stay_below_the_rounding() -> None:
    data = images()
    model = prune(convolutions(), PruneMode.UNSTRUCTURED_MAGNITUDE_LOCAL, ratio=0.6)
    plain = strip(prepare(model, data[0], data))
    for layer in (plain[0], plain[3], plain[5], plain[8]):
        w = layer.parametrizations.weight.original
        assert float((w == 0).float().mean()) >= 0.59 and torch.equal(layer.weight, w)
        assert isinstance(layer.parametrizations.weight[0], FixedQuantizer)


def test_arguments_by_keyword_and_ignored_layers() -> None:
    model = prepare(Attention(), {"ids": IDS}, [{"ids": IDS}], IgnoredScope(names=("q", "up")))
    assert not hasattr(model.q, "input_quantizer") and hasattr(model.k, "input_quantizer") and not hasattr(model.up, "parametrizations")


def test_refusals() -> None:
    data = images()
    with pytest.raises(CalibrationError, match="empty"):
        prepare(convolutions(), data[0], [])
    with pytest.raises(CalibrationError, match="NaN"):
        prepare(convolutions(), data[0], [data[0] * float("nan")])
    with pytest.raises(OptionError, match="already"):
        prepare(prepare(convolutions(), data[0], data), data[0], data)
    with pytest.raises(OptionError, match="preset"):
        prepare(convolutions(), data[0], data, preset="fast")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="range_estimator"):
        prepare(convolutions(), data[0], data, range_estimator="mean")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="subset_size"):
        prepare(convolutions(), data[0], data, subset_size=0)
    with pytest.raises(RuleError, match="no weight"):
        prepare(convolutions(), data[0], data, IgnoredScope(names=("nothing",)))
    broken = convolutions()
    with torch.no_grad():
        broken[0].weight[0] = float("inf")
    with pytest.raises(NonFiniteWeightError):
        prepare(broken, data[0], data)
