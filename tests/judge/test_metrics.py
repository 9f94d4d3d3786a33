from __future__ import annotations

import numpy as np
import pytest

from llmcomp.judge.metrics import Window, log_softmax, token_kl, token_nll, windows


def test_disjoint_windows() -> None:
    assert list(windows(10, 4, 4)) == [Window(0, 4, 0), Window(4, 8, 0)]
    assert list(windows(10, 4, 4, limit=1)) == [Window(0, 4, 0)] and list(windows(3, 4, 4)) == []


def test_a_stride_scores_every_token_once() -> None:
    spans = list(windows(20, 8, 3))
    scored = [t for w in spans for t in range(w.start + w.scored.start, w.start + w.scored.stop)]
    assert scored == list(range(1, spans[-1].stop))


def test_against_the_definitions_in_float64() -> None:
    rng = np.random.default_rng(0)
    p, q = rng.normal(size=(2, 6, 50)) * 4
    ids = rng.integers(0, 50, 6)
    probabilities = [np.exp(z) / np.exp(z).sum(-1, keepdims=True) for z in (p, q)]
    reference, logp = log_softmax(p.astype(np.float32)), log_softmax(q.astype(np.float32))
    # f32 against float64.
    np.testing.assert_allclose(logp, np.log(probabilities[1]), atol=1e-5)
    kl = (probabilities[0] * np.log(probabilities[0] / probabilities[1])).sum(-1)
    np.testing.assert_allclose(token_kl(reference, logp), kl, rtol=1e-4)
    wanted = [-np.log(probabilities[1][t - 1, ids[t]]) for t in range(1, 6)]
    np.testing.assert_allclose(token_nll(logp, ids, Window(0, 6, 0)), wanted, rtol=1e-4)
    np.testing.assert_allclose(token_nll(logp, ids, Window(0, 6, 4)), wanted[3:], rtol=1e-4)


def test_a_model_against_itself() -> None:
    logp = log_softmax(np.random.default_rng(0).normal(size=(4, 9)).astype(np.float32))
    assert not token_kl(logp, logp).any()


def test_logits_are_not_changed() -> None:
    z = np.ones((2, 3), np.float32)
    log_softmax(z)
    assert (z == 1).all()


@pytest.mark.parametrize("large", [1e4, -1e4])
def test_large_logits_do_not_overflow(large: float) -> None:
    z = np.zeros((1, 3), np.float32)
    z[0, 0] = large
    assert np.isfinite(log_softmax(z)).all()
