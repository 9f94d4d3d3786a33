"""What training sees is what will be stored, and its gradients are those of the function with the roundings' remainders held."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llmcomp import formats
from llmcomp.errors import OptionError
from llmcomp.training.fake_quantize import fake_quantize

FORMATS = ("int8_asym", "int8_sym", "int4_asym", "int4_sym", "int3_sym", "int2_sym")
GROUP = {"int8_asym": -1, "int8_sym": -1}
STEP = 1e-6


def start(name: str, seed: int = 0) -> tuple[formats.Format, int, np.ndarray, formats.CompressedWeight]:
    fmt, rng = formats.get(name), np.random.default_rng(seed)
    w = rng.normal(size=(6, 64)).astype(np.float32)
    group = GROUP.get(name, 32)
    return fmt, group, w, formats.quantize(fmt, w, group)


def tensors(stored: formats.CompressedWeight) -> tuple[torch.Tensor, torch.Tensor | None]:
    zeros = None if stored.zero_point is None else torch.tensor(stored.zero_point.astype(np.float32))
    return torch.tensor(stored.scale.astype(np.float32)), zeros


@pytest.mark.parametrize("name", FORMATS)
def test_the_value_is_that_of_the_stored_weight(name: str) -> None:
    fmt, group, w, _ = start(name)
    scale = formats.quantize(fmt, w, group).scale.astype(np.float16).astype(np.float32)
    oracle = formats.quantize(fmt, w, group)
    oracle = formats.quantize(fmt, w, group, "minmax", scale, oracle.zero_point)
    s, z = tensors(oracle)
    found = fake_quantize(fmt, torch.tensor(w), group, s, z).numpy()
    np.testing.assert_array_equal(found, oracle.stored().dequantize())


@pytest.mark.parametrize("name", FORMATS)
def test_gradients_are_those_of_finite_differences_with_remainders_held(name: str) -> None:
    """In float64: f(w, s, z) = (clip(w/s + z' + e) - z') s, where e and what rounds z to z' are the remainders at the point of interest."""
    fmt, group, w, stored = start(name, 1)
    scale, zero = tensors(stored)
    # A tighter range than the weights', so that some are outside at both ends.
    scale = scale * 0.8
    if zero is not None:
        zero = zero + 0.3
    given = [torch.tensor(w, requires_grad=True), scale.clone().requires_grad_(True)]
    if zero is not None:
        given.append(zero.clone().requires_grad_(True))
    g = torch.tensor(np.random.default_rng(2).normal(size=w.shape).astype(np.float32))
    fake_quantize(fmt, given[0], group, *given[1:]).backward(g)

    point = [x.detach().double().numpy() for x in given]
    point[1] = point[1].astype(np.float16).astype(np.float64)
    bits, asym = fmt.bits, zero is not None
    low, high = (0.0, 2.0**bits - 1) if asym else (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1)
    shape = formats.grouped_shape(w.shape, group)
    at = point[0].reshape(shape) / point[1] + (np.clip(np.rint(point[2]), low, high) if asym else 0.0)
    e = np.rint(at) - at
    kept = np.clip(np.rint(point[2]), low, high) - point[2] if asym else 0.0

    # Whether a weight is inside is held as well: one whose code is the first or the last is inside.
    below, above = np.rint(at) < low, np.rint(at) > high

    def f(w: np.ndarray, s: np.ndarray, z: np.ndarray | float = 0.0) -> np.ndarray:
        z = z + kept
        q = np.where(below, low, np.where(above, high, w.reshape(shape) / s + z + e))
        return ((q - z) * s).reshape(w.shape)

    assert below.any() and above.any()
    for i, found in enumerate(given):
        wanted = np.zeros(point[i].shape)
        for index in np.ndindex(*point[i].shape):
            moved = [[x.copy() for x in point] for _ in range(2)]
            moved[0][i][index] += STEP
            moved[1][i][index] -= STEP
            wanted[index] = ((f(*moved[0]) - f(*moved[1])) * g.numpy()).sum() / (2 * STEP)
        # f32 gradients, summed over a row of 64 for scales of one group.
        assert found.grad is not None
        np.testing.assert_allclose(found.grad.double().numpy(), wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


def test_other_formats_are_refused() -> None:
    w, s = torch.zeros(4, 64), torch.ones(4, 2, 1)
    with pytest.raises(OptionError, match="nf4"):
        fake_quantize(formats.get("nf4"), w, 32, s)
    with pytest.raises(OptionError, match="it has zero points"):
        fake_quantize(formats.get("int4_asym"), w, 32, s)
    with pytest.raises(OptionError, match="it has no zero points"):
        fake_quantize(formats.get("int4_sym"), w, 32, s, s)
