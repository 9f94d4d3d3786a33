from __future__ import annotations

import numpy as np
import pytest

from llmcomp.judge.metrics import Window, log_softmax, mean_over_windows, token_kl, token_nll, windows
from llmcomp.judge.tally import Tally
from llmcomp.judge.tokens import _words


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


def test_mean_over_windows_over_equal_windows_are_the_textbook_s() -> None:
    values = np.random.default_rng(0).gamma(2, size=(5, 7))
    mean, error = mean_over_windows(list(values))
    assert mean == pytest.approx(values.mean())
    assert error == pytest.approx(values.mean(-1).std(ddof=1) / np.sqrt(5))
    assert mean_over_windows([values[0]]) == (pytest.approx(values[0].mean()), None)


def test_unequal_windows_count_by_their_tokens() -> None:
    a, b = np.array([1.0, 2.0, 3.0, 6.0]), np.array([5.0])
    mean, error = mean_over_windows([a, b])
    assert mean == pytest.approx(17 / 5)
    # sqrt(2 ((12 - 4 * 3.4)^2 + (5 - 3.4)^2)) / 5
    assert error == pytest.approx(np.sqrt(2 * (1.6**2 + 1.6**2)) / 5)


def test_words_belong_to_the_token_that_begins_them() -> None:
    text = " ab cd\u00a0\u20ac  e"
    #        a  b  _c  d  nbsp, then the euro sign in two byte tokens, spaces, e
    offsets = [(0, 2), (2, 3), (3, 5), (5, 6), (6, 7), (7, 8), (7, 8), (8, 10), (10, 11)]
    assert _words(text, len(offsets), offsets).tolist() == [1, 0, 1, 0, 0, 1, 0, 0, 1]
    assert _words("   ", 1, [(0, 3)]).tolist() == [0] and _words("", 0, []).tolist() == []


def test_a_tokenizer_without_offsets_spreads_the_words() -> None:
    assert _words("a b c", 4, None).tolist() == [0.75] * 4


def test_perplexities_of_a_window() -> None:
    tally = Tally("m", None)
    logp = np.log(np.array([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25], [0.2, 0.4, 0.4]], np.float32))
    # Tokens 1 and 2 are scored, at 1/4 and 1/2; a word begins in tokens 0 and 2, and token 0 is not scored.
    tally.add(logp, np.array([0, 1, 0]), np.array([1.0, 0.0, 1.0]), Window(0, 3, 0))
    scores = tally.scores(1, 3, 3)
    assert scores.perplexity == pytest.approx(8**0.5) and scores.word_perplexity == pytest.approx(8)
    assert scores.tokens == 2 and scores.kl is None and scores.top1 is None


def test_a_text_without_spaces() -> None:
    """One word of more nats than a float has room for, and none."""
    logp = np.full((3000, 2), -0.5, np.float32)
    ids, words = np.zeros(3000, np.int64), np.zeros(3000)
    tally = Tally("m", None)
    tally.add(logp, ids, words, Window(0, 3000, 0))
    assert tally.scores(1, 3000, 3000).word_perplexity is None
    words[1] = 1
    tally.add(logp, ids, words, Window(0, 3000, 0))
    assert tally.scores(2, 3000, 3000).word_perplexity == np.inf
