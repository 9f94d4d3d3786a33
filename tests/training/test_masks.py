"""Which weights fall, against float64 twins; ties, tiny and equal tensors; the learned mask's value and gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from llmcomp.errors import OptionError
from llmcomp.training.masks import BinaryMask, TrainableMask, check_ratio, fallen_count, global_masks, kept_largest, local_masks

SHAPES = ((6, 5), (4, 3, 3, 3), (7,))


def tensors(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=shape) * 10.0**i).astype(np.float32) for i, shape in enumerate(SHAPES)]


def twin(importance: np.ndarray, ratio: float) -> np.ndarray:
    """True for all but the first floor(ratio n) in the stable order of float64 importance."""
    flat = importance.reshape(-1)
    kept = np.ones(flat.size, bool)
    kept[np.argsort(flat, kind="stable")[: int(np.floor(round(ratio * flat.size, 9)))]] = False
    return kept.reshape(importance.shape)


@pytest.mark.parametrize("ratio", [0, 0.1, 0.5, 0.7, 0.99])
def test_local(ratio: float) -> None:
    weights = tensors()
    for w, mask in zip(weights, local_masks([torch.tensor(w) for w in weights], ratio), strict=True):
        np.testing.assert_array_equal(mask.numpy(), twin(np.abs(w.astype(np.float64)), ratio))


@pytest.mark.parametrize("ratio", [0, 0.1, 0.5, 0.7, 0.99])
def test_global_weighs_each_tensor_by_its_norm(ratio: float) -> None:
    weights = tensors()
    pooled = np.concatenate([np.abs(w.astype(np.float64)).ravel() / np.linalg.norm(w.astype(np.float64)) for w in weights])
    found = global_masks([torch.tensor(w) for w in weights], ratio)
    np.testing.assert_array_equal(np.concatenate([m.numpy().ravel() for m in found]), twin(pooled, ratio))
    assert [m.shape for m in found] == [w.shape for w in weights]


def test_the_ratio_is_the_decimal_that_is_written() -> None:
    assert [fallen_count(0.7, 10), fallen_count(0.29, 100), fallen_count(0.1, 3), fallen_count(0.999999, 1)] == [7, 29, 0, 0]


def test_of_equals_the_first_fall() -> None:
    found = kept_largest(torch.tensor([2.0, 1.0, 1.0, 0.5, 1.0, 1.0]), 3)
    assert found.tolist() == [True, False, False, False, True, True]
    equal = local_masks([torch.full((10, 10), 0.25)], 0.7)[0]
    assert int((~equal).sum()) == 70 and not equal.flatten()[:70].any()


def test_a_tensor_of_zeros_falls_first_and_one_weight_stays() -> None:
    zeros, ones = global_masks([torch.zeros(4), torch.ones(4)], 0.5)
    assert not zeros.any() and ones.all()
    assert local_masks([torch.ones(1)], 0.9)[0].all()


@pytest.mark.parametrize("ratio", [1, 1.5, -0.1, float("nan"), True, "0.5"])
def test_ratios_that_are_none(ratio: object) -> None:
    with pytest.raises(OptionError, match="not a number in"):
        check_ratio(ratio)  # type: ignore[arg-type]


def test_what_has_fallen_gets_no_gradient() -> None:
    w = torch.tensor([3.0, -2.0, 1.0], requires_grad=True)
    y = BinaryMask(torch.tensor([True, False, True]))(w)
    y.backward(torch.tensor([5.0, 7.0, 11.0]))
    assert y.tolist() == [3, 0, 1] and w.grad is not None and w.grad.tolist() == [5, 0, 11]


def test_learned_mask_without_noise() -> None:
    mask = TrainableMask(torch.Size([3]), torch.device("cpu")).eval()
    assert mask.mask.tolist() == pytest.approx([math.log(99)] * 3)
    with torch.no_grad():
        mask.mask.copy_(torch.tensor([0.3, -0.3, 0.0]))
    w = torch.tensor([2.0, 3.0, 4.0], requires_grad=True)
    y = mask(w)
    y.backward(torch.tensor([1.0, 10.0, 100.0]))
    sigma = 1 / (1 + np.exp(-np.array([0.3, -0.3, 0.0])))
    # A half exactly is no step.
    assert y.tolist() == [2, 0, 0] and mask.binary().tolist() == [True, False, False]
    assert w.grad is not None and w.grad.tolist() == [1, 0, 0]
    # f32 against f64.
    np.testing.assert_allclose(mask.mask.grad.numpy(), np.array([2.0, 30.0, 400.0]) * sigma * (1 - sigma), rtol=1e-6)


def test_learned_mask_keeps_with_its_probability_in_training() -> None:
    torch.manual_seed(0)
    mask = TrainableMask(torch.Size([20000]), torch.device("cpu"))
    with torch.no_grad():
        mask.mask.fill_(0.3)
    kept = float((mask(torch.ones(20000)) != 0).float().mean())
    # Three standard deviations of a mean of 20000 coins.
    assert abs(kept - 1 / (1 + math.exp(-0.3))) < 3 * 0.5 / math.sqrt(20000)
