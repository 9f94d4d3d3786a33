"""Quantizers are torch's own fake quantization to the bit; their gradients are those of the function with the roundings' remainders held, by differences."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from llmcomp.training.quantizers import AsymmetricQuantizer, RangeQuantizer, SymmetricQuantizer, asymmetric, symmetric, weight_quantizer

STEP = 1e-6
X = np.random.default_rng(0).normal(size=(4, 3, 5)).astype(np.float32) * 2

MAKERS: dict[str, Callable[[], RangeQuantizer]] = {
    "signed": lambda: SymmetricQuantizer(torch.tensor([1.7])),
    "unsigned": lambda: SymmetricQuantizer(torch.tensor([2.3]), signed=False),
    "narrow channels": lambda: SymmetricQuantizer(torch.tensor([1.0, 1.5, 2.5]).reshape(1, 3, 1), 1, narrow=True),
    "asymmetric": lambda: AsymmetricQuantizer(torch.tensor([-1.13]), torch.tensor([3.31])),
    "asymmetric channels": lambda: AsymmetricQuantizer(
        torch.tensor([-1.1, -0.4, -3.0]).reshape(1, 3, 1), torch.tensor([2.0, 3.0, 5.0]).reshape(1, 3, 1), 1
    ),
    "asymmetric from zero": lambda: AsymmetricQuantizer(torch.tensor([0.0]), torch.tensor([3.0])),
}


@pytest.mark.parametrize("name", MAKERS)
def test_value_is_torchs_to_the_bit(name: str) -> None:
    quantizer, x = MAKERS[name](), torch.tensor(X)
    found = quantizer(x)
    # ONNX has no codes -127..127, so what is fixed has -128 too: strip puts the weights on their grid first.
    assert torch.equal(found, quantizer.fixed()(found if name.startswith("narrow") else x))
    assert torch.equal(quantizer(torch.zeros(4, 3, 5)), torch.zeros(4, 3, 5))
    assert torch.equal(quantizer(found), found)
    assert quantizer(x.bfloat16()).dtype is torch.bfloat16


@pytest.mark.parametrize("name", MAKERS)
def test_gradients_by_differences(name: str) -> None:
    """In float64: f(x, a) = (clip'(x / s + z + e) - z) s with z = -l / s + k; e, k and which x are outside are those of the point."""
    quantizer = MAKERS[name]()
    x = torch.tensor(X, requires_grad=True)
    g = np.random.default_rng(1).normal(size=X.shape)
    quantizer(x).backward(torch.tensor(g.astype(np.float32)))
    parameters = list(quantizer.parameters())
    low, high = quantizer.codes()
    asym = isinstance(quantizer, AsymmetricQuantizer)

    def grid(point: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        s = point[2] / 255 if asym else point[1] / high
        return s, -point[1] / s if asym else np.zeros_like(s)

    point = [X.astype(np.float64), *(p.detach().double().numpy() for p in parameters)]
    s0, z0 = grid(point)
    k = np.rint(z0) - z0
    at = point[0] / s0 + z0 + k
    e = np.rint(at) - at
    below, above = np.rint(at) < low, np.rint(at) > high

    def f(point: list[np.ndarray]) -> np.ndarray:
        s, z = grid(point)
        z = z + k
        return (np.where(below, low, np.where(above, high, point[0] / s + z + e)) - z) * s

    assert below.any() and above.any()
    for i, found in enumerate([x, *parameters]):
        wanted = np.zeros(point[i].shape)
        for index in np.ndindex(*wanted.shape):
            moved = [[a.copy() for a in point] for _ in range(2)]
            moved[0][i][index] += STEP
            moved[1][i][index] -= STEP
            wanted[index] = ((f(moved[0]) - f(moved[1])) * g).sum() / (2 * STEP)
        assert found.grad is not None
        # f32 gradients, summed over the sixty values of a range; (y - x) / a is a difference of near ones, an f32 error of 1e-7 in codes up to 255.
        np.testing.assert_allclose(found.grad.numpy(), wanted, rtol=1e-3, atol=1e-4 * np.abs(wanted).max())


def test_gradients_in_closed_form() -> None:
    """(y - x) / a inside, 1 above, low / high below."""
    quantizer = SymmetricQuantizer(torch.tensor([1.0]))
    for value, slope in ((0.3, None), (5.0, 1.0), (-5.0, -128 / 127)):
        quantizer.zero_grad()
        x = torch.tensor([value], requires_grad=True)
        y = quantizer(x)
        y.backward()
        wanted = slope if slope is not None else float(y.detach() - value)
        assert x.grad is not None and float(x.grad) == (1.0 if slope is None else 0.0)
        # f32: x / s of about 38 is off by 4e-6.
        assert float(quantizer.scale.grad) == pytest.approx(wanted, abs=1e-6)


def test_start_of_symmetric_ranges() -> None:
    signed = symmetric(torch.tensor([-3.0]), torch.tensor([2.0]))
    assert signed.codes() == (-128, 127) and float(signed.scale) == 3
    unsigned = symmetric(torch.tensor([0.0]), torch.tensor([2.0]))
    assert unsigned.codes() == (0, 255) and float(unsigned.scale) == 2
    assert float(symmetric(torch.zeros(1), torch.zeros(1)).scale) == pytest.approx(8e-5)
    w = torch.zeros(3, 2, 2)
    w[0, 0, 0], w[1, 1, 1] = -4.0, 0.5
    assert weight_quantizer(w, 0).scale.flatten().tolist() == pytest.approx([4.0, 0.5, 0.04])
    assert weight_quantizer(w, 1).scale.flatten().tolist() == [4.0, 0.5]
    assert weight_quantizer(w, 0).codes() == (-127, 127)


def test_start_of_asymmetric_ranges() -> None:
    """Covers what was seen, with zero on the grid: the smallest such range, found here by trying every zero point in float64."""
    rng = np.random.default_rng(0)
    for low, high in [*(-rng.random(20) * 3).reshape(10, 2) * [1, -1], (0.0, 1.0), (-2.0, 0.0), (0.5, 1.0), (-1.0, -0.5)]:
        quantizer = asymmetric(torch.tensor([low]), torch.tensor([high]))
        low, high = min(low, 0.0), max(high, 0.0)
        step, zero = (float(x) for x in quantizer.grid())
        assert -zero * step <= low + 1e-6 and (255 - zero) * step >= high - 1e-6
        best = min(
            max(-low / z if z else (0 if low == 0 else np.inf), high / (255 - z) if z < 255 else (0 if high == 0 else np.inf))
            for z in range(256)
        )
        # A zero point beside the rounded one may be a hair better.
        assert best * (1 - 1e-6) <= step <= best * (1 + 1 / 127)


def test_extra_state_says_signed() -> None:
    state = symmetric(torch.tensor([0.0]), torch.tensor([2.0])).state_dict()
    other = symmetric(torch.tensor([-1.0]), torch.tensor([2.0]))
    other.load_state_dict(state)
    assert other.codes() == (0, 255)
