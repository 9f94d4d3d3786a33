"""The divergence from k tokens and a tail against a float64 twin; its gradients against those that autograd finds without chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from llmcomp.training.divergence import Targets, divergence, mean_divergence, normalized, summed_divergence
from llmcomp.training.logits import Reading
from llmcomp.training.teacher import likeliest
from tests.reference import divergence as twin

TOKENS, WIDTH, VOCABULARY = 13, 8, 50


def data(spread: float = 3.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Teacher's logits, and the student's hidden states, matrix and bias."""
    make = torch.Generator().manual_seed(0)
    z = spread * torch.randn(TOKENS, VOCABULARY, generator=make)
    hidden = torch.randn(TOKENS, WIDTH, generator=make)
    return z, hidden, torch.randn(VOCABULARY, WIDTH, generator=make), torch.randn(VOCABULARY, generator=make)


def plain(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    """The sum as its definition reads, for autograd."""
    log_q = functional.log_softmax(logits.double(), -1)
    p, ids, tail = normalized(targets)
    rest = torch.ones_like(log_q).scatter(1, ids, 0.0).bool()
    nats = (p.double().exp() * (p.double() - log_q.gather(1, ids))).sum(-1)
    if rest.any():
        nats = nats + tail.double().exp() * (tail.double() - log_q.masked_fill(~rest, -torch.inf).logsumexp(-1))
    return nats.sum()


@pytest.mark.parametrize("k", [1, 5, 49, 50])
def test_the_value_is_the_twins(k: int) -> None:
    z, hidden, w, _ = data()
    y, targets = hidden @ w.T, likeliest(z, k)
    found, _ = divergence(y, normalized(targets))
    expected = twin.kept(targets.log_p.numpy(), targets.ids.numpy(), targets.log_tail.numpy(), y.numpy())
    # f32 logarithms of up to 20 nats.
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_with_every_token_kept_it_is_the_full_divergence_and_with_fewer_less() -> None:
    z, hidden, w, _ = data()
    y = hidden @ w.T
    expected = twin.full(z.numpy(), y.numpy()).mean()
    assert float(mean_divergence(y, likeliest(z, VOCABULARY))) == pytest.approx(expected, rel=1e-5)
    # The tail taken as one token hides what differs inside it (data processing inequality).
    few = float(mean_divergence(y, likeliest(z, 5)))
    assert 0.1 * expected < few < expected


def test_a_tail_of_almost_nothing_keeps_its_precision() -> None:
    z = torch.zeros(1, 8)
    z[0, 0] = 60.0
    y = z.clone()
    y[0, 0] = 50.0
    found, gradient = divergence(y, normalized(likeliest(z, 1)))
    tail = 7 * np.exp(-50.0)
    assert float(found) == pytest.approx(np.log1p(tail), abs=1e-12)
    # (Q - P) / 7 in each of the tail: 1 - q would have given 0.
    np.testing.assert_allclose(gradient[0, 1:], tail / 7 * (1 - np.exp(-10.0)), rtol=1e-5)


@pytest.mark.parametrize("reading", [Reading(), Reading(0.25), Reading(2.0, 5.0)], ids=["plain", "scaled", "capped"])
@pytest.mark.parametrize("chunk", [1, 4, 13, 99])
@pytest.mark.parametrize("k", [5, VOCABULARY])
def test_gradients_are_those_without_chunks(reading: Reading, chunk: int, k: int) -> None:
    z, *given = data()
    targets = likeliest(z, k)
    ours = [t.clone().requires_grad_() for t in given]
    summed_divergence(*ours, targets, reading, chunk).mul(0.5).backward()
    theirs = [t.clone().requires_grad_() for t in given]
    plain(reading.shape(functional.linear(*theirs)), targets).mul(0.5).backward()
    for a, b in zip(ours, theirs, strict=True):
        # Sums of 13 and 50 terms in f32.
        np.testing.assert_allclose(a.grad, b.grad, rtol=1e-4, atol=1e-5)


def test_a_frozen_matrix_costs_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    z, hidden, w, b = data()
    made: list[Any] = []
    zeros = torch.zeros_like
    monkeypatch.setattr(torch, "zeros_like", lambda t, **more: made.append(tuple(t.shape)) or zeros(t, **more))
    hidden.requires_grad_()
    loss = summed_divergence(hidden, w, b, likeliest(z, 5), Reading(), 4)
    assert made == [(TOKENS, WIDTH)]
    loss.backward()
    assert w.grad is None and hidden.grad is not None


def test_without_gradients_none_are_made() -> None:
    z, hidden, w, b = data()
    with torch.no_grad():
        loss = summed_divergence(hidden.requires_grad_(), w.requires_grad_(), b, likeliest(z, 5), Reading())
    assert not loss.requires_grad


def test_no_logits_are_larger_than_a_chunk() -> None:
    z, hidden, w, b = data()
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.ndim == 2 and out.shape[-1] == VOCABULARY:
                largest = max(largest, len(out))
            return out

    hidden.requires_grad_()
    targets = likeliest(z, 5)
    with Watch():
        summed_divergence(hidden, w, b, targets, Reading(), 10).backward()
    # The matrix turned has WIDTH rows.
    assert WIDTH < largest == 10


def test_bf16_products_under_autocast() -> None:
    z, hidden, w, _ = data()
    exact = float(summed_divergence(hidden, w, None, likeliest(z, 5), Reading()))
    with torch.autocast("cpu", torch.bfloat16):
        found = float(summed_divergence(hidden, w, None, likeliest(z, 5), Reading()))
    # bf16 has 8 bits: logits of 10 are off by 0.02, and those of a token in both directions.
    assert found != exact and found == pytest.approx(exact, rel=0.02)


def test_rounding_to_f16_keeps_the_minimum_at_the_teacher() -> None:
    z, *_ = data()
    targets = likeliest(z, 30)
    rounded = Targets(targets.log_p.half(), targets.ids, targets.log_tail)
    nats, gradient = divergence(z, normalized(rounded))
    assert float(nats.min()) > -1e-6
    # Gradients of a softmax sum to zero only where the teacher's masses sum to one.
    np.testing.assert_allclose(gradient.sum(-1), 0, atol=1e-6)
