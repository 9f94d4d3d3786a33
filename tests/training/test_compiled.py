"""Fake quantization compiled by torch.compile: the values and the gradients of its eager twin. All other tests run the twin."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from llmcomp import formats
from llmcomp.training import quantized
from llmcomp.training.fake_quantize import fake_quantize

ROWS, COLUMNS, GROUP = 24, 64, 32


@pytest.mark.parametrize("name", ["int4_asym", pytest.param("int4_sym", marks=pytest.mark.longest)])
def test_compiled_is_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    w = rng.normal(size=(ROWS, COLUMNS)).astype(np.float32)
    start = formats.quantize(formats.get(name), w, GROUP).stored()
    outer = torch.from_numpy(rng.normal(size=w.shape).astype(np.float32))

    def run(function: object) -> list[np.ndarray]:
        leaves = [torch.from_numpy(w), torch.from_numpy(0.8 * start.scale.astype(np.float32))]
        if start.zero_point is not None:
            leaves.append(torch.from_numpy(start.zero_point.astype(np.float32)))
        leaves = [leaf.clone().requires_grad_() for leaf in leaves]
        value = function(start.format, leaves[0], GROUP, *leaves[1:])  # type: ignore[operator]
        value.backward(outer)
        return [value.detach().numpy(), *(leaf.grad.numpy() for leaf in leaves)]

    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    with torch._dynamo.config.patch(disable=False):
        quantized.compiled.cache_clear()
        compiled = quantized.compiled()
        assert (compiled is not fake_quantize) == any(map(shutil.which, ("c++", "g++", "clang++")))
        found = run(compiled)
    quantized.compiled.cache_clear()
    expected = run(fake_quantize)
    # A division may become a product with the reciprocal, and a weight on the edge between two levels falls to the other one.
    moved = np.abs(found[0] - expected[0]) > 1e-6
    assert moved.mean() < 0.002
    scale = np.abs(start.scale.astype(np.float32)).max()
    np.testing.assert_allclose(found[0], expected[0], atol=1.01 * scale)
    np.testing.assert_allclose(found[1], expected[1], atol=1e-6)
    for one, other in zip(found[2:], expected[2:], strict=True):
        # Sums over a group in another order, and one level more or less for what has moved.
        np.testing.assert_allclose(one, other, atol=1e-4 + 4 * float(np.abs(outer.numpy()).max()) * bool(moved.any()))
