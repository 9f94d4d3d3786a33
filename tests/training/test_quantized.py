"""Modules whose weights are rounded: their start, their gradients, and what is left of them without adapters."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llmcomp import formats
from llmcomp.errors import OptionError
from llmcomp.options.modes import StripFormat
from llmcomp.training.quantized import MARGIN, Start, hold, original, quantize_weight, quantized_weights
from llmcomp.training.strip import strip

FORMATS = ("int8_asym", "int8_sym", "int4_asym", "int4_sym")
ROWS, COLUMNS = 24, 64


def start(name: str, group: int, seed: int = 0, transposed: bool = False) -> tuple[torch.nn.Module, Start]:
    """A module and codes for it as calibration may leave them: some are not the nearest to the weight."""
    rng = np.random.default_rng(seed)
    w = rng.normal(size=(ROWS, COLUMNS)).astype(np.float32)
    stored = formats.quantize(formats.get(name), w, group).stored()
    codes = stored.codes.copy()
    moved = rng.random(codes.shape) < 0.1
    low, high = (
        (0, 2**stored.format.bits - 1) if codes.dtype == np.uint8 else (-(2 ** (stored.format.bits - 1)), 2 ** (stored.format.bits - 1) - 1)
    )
    codes[moved] = np.clip(codes[moved].astype(int) + rng.choice((-1, 1), codes.shape)[moved], low, high).astype(codes.dtype)
    weight = formats.CompressedWeight(stored.format, stored.shape, group, codes, stored.scale, stored.zero_point)
    module = torch.nn.Linear(COLUMNS, ROWS)
    if transposed:
        from transformers.pytorch_utils import Conv1D

        module = Conv1D(ROWS, COLUMNS)
    with torch.no_grad():
        module.weight.copy_(torch.from_numpy(w.T if transposed else w))
    return module, Start(weight, transposed)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("group", [-1, 32])
@pytest.mark.parametrize("name", FORMATS)
def test_the_first_step_is_the_start_to_the_bit(name: str, group: int, transposed: bool) -> None:
    module, given = start(name, group, transposed=transposed)
    one = quantize_weight([module], given, rank=8)
    found = module.weight.detach().numpy()
    np.testing.assert_array_equal(found.T if transposed else found, given.weight.dequantize())
    again = one.compressed(original(module))
    np.testing.assert_array_equal(again.codes, given.weight.codes)
    np.testing.assert_array_equal(again.scale, given.weight.scale)


@pytest.mark.parametrize("name", FORMATS)
def test_frozen_codes_stay_whatever_the_scales_become(name: str) -> None:
    module, given = start(name, 32)
    one = quantize_weight([module], given, frozen=True)
    np.testing.assert_array_equal(module.weight.detach().numpy(), given.weight.dequantize())
    with torch.no_grad():
        one.gain.mul_(torch.from_numpy(np.random.default_rng(3).uniform(0.5, 2, one.gain.shape).astype(np.float32)))
    np.testing.assert_array_equal(one.compressed(original(module)).codes, given.weight.codes)
    module.weight.sum().backward()
    units = given.weight.dequantize().astype(np.float64).reshape(ROWS, -1, 32)
    # The gradient of sum((q - z) s1 g) for g, in f32.
    np.testing.assert_allclose(one.gain.grad.numpy()[..., 0], units.sum(-1), rtol=1e-3, atol=1e-3)


def test_weights_that_are_near_their_level_are_kept() -> None:
    _, given = start("int4_asym", 32)
    step = np.repeat(np.abs(given.weight.scale.astype(np.float32)), 32, -1).reshape(ROWS, COLUMNS)
    level = given.weight.dequantize()
    w = (level + np.random.default_rng(1).uniform(-0.8, 0.8, level.shape) * step).astype(np.float32)
    held = hold(torch.from_numpy(w), given.weight).numpy()
    near = np.abs(w - level) < (MARGIN - 1e-3) * step
    np.testing.assert_array_equal(held[near], w[near])
    # A float32 rounding of what is not near.
    assert np.abs(held - level).max() <= (MARGIN * step).max() * (1 + 1e-5) and near.any() and not near.all()


def test_adapters_get_the_gradient_of_the_weight() -> None:
    module, given = start("int4_asym", 32)
    one = quantize_weight([module], given, rank=8)
    rng = np.random.default_rng(2)
    b, a = (rng.normal(size=shape) * 0.05 for shape in ((ROWS, 8), (8, COLUMNS)))
    with torch.no_grad():
        one.lora_B.copy_(torch.from_numpy(b))
        one.lora_A.copy_(torch.from_numpy(a))
    g = rng.normal(size=(ROWS, COLUMNS))
    module.weight.backward(torch.from_numpy(g.astype(np.float32)))
    w = original(module).detach().double().numpy() + one.lora_B.detach().double().numpy() @ one.lora_A.detach().double().numpy()
    scale, zero = (np.repeat(x.astype(np.float64), 32, -1).reshape(w.shape) for x in (given.weight.scale, given.weight.zero_point))
    level = np.round(w / scale) + zero
    inside = g * ((level >= 0) & (level <= 15))
    assert (level < 0).any() or (level > 15).any()
    # f32 products of 24 to 64 terms.
    np.testing.assert_allclose(one.lora_B.grad.numpy(), inside @ one.lora_A.detach().numpy().T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(one.lora_A.grad.numpy(), one.lora_B.detach().numpy().T @ inside, rtol=1e-4, atol=1e-4)
    assert original(module).grad is None and one.gain.grad is not None


@pytest.mark.parametrize("kind", list(StripFormat))
@pytest.mark.parametrize("name", FORMATS)
def test_a_stripped_module_computes_what_the_trained_one_did(name: str, kind: StripFormat) -> None:
    for group, transposed in ((-1, False), (32, True)):
        module, given = start(name, group, transposed=transposed)
        one = quantize_weight([module], given, rank=4)
        with torch.no_grad():
            for parameter in (one.lora_A, one.lora_B):
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) * 0.05)
            one.gain.mul_(1.01)
            before = module.weight.clone()
            stripped = strip(module, False, kind)
            # torch's own fake quantization divides by the step's inverse: a weight between two levels may fall to the other, rarely.
            differs = (stripped.weight != before).double().mean()
            assert differs < (1e-3 if kind is StripFormat.NATIVE else 1e-12), differs
            np.testing.assert_allclose(stripped.weight.numpy(), before.numpy(), atol=float(np.abs(given.weight.scale).max()) * 1.1)
        assert not any("lora" in name for name in stripped.state_dict()) and not list(quantized_weights(stripped))


@pytest.mark.parametrize("kind", list(StripFormat))
def test_tied_modules_stay_tied(kind: StripFormat) -> None:
    table, given = start("int8_asym", -1)
    embedding, head = torch.nn.Embedding(ROWS, COLUMNS), torch.nn.Linear(COLUMNS, ROWS, bias=False)
    embedding.weight = head.weight = table.weight
    model = torch.nn.ModuleDict({"embedding": embedding, "head": head})
    one = quantize_weight([embedding, head], given, rank=4)
    with torch.no_grad():
        one.lora_B.add_(0.1)
        before = head.weight.clone()
        np.testing.assert_array_equal(embedding.weight.numpy(), before.numpy())
        strip(model, False, kind)
        np.testing.assert_array_equal(embedding.weight.numpy(), head.weight.numpy())
        # A weight half-way between two levels may fall to the other one in torch's own operation.
        assert (head.weight != before).double().mean() < 1e-3


def test_a_rank_larger_than_a_layer_is_refused() -> None:
    module, given = start("int4_asym", 32)
    with pytest.raises(OptionError, match=f"rank {ROWS + 1}"):
        quantize_weight([module], given, rank=ROWS + 1)
