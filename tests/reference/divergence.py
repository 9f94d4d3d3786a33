"""KL from k kept tokens and a tail, in float64."""

from __future__ import annotations

import numpy as np


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z.astype(np.float64)
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def full(z: np.ndarray, y: np.ndarray) -> np.ndarray:
    """KL of each token between logits [n, vocabulary]."""
    p, q = log_softmax(z), log_softmax(y)
    return (np.exp(p) * (p - q)).sum(-1)


def kept(log_p: np.ndarray, ids: np.ndarray, log_tail: np.ndarray, y: np.ndarray) -> np.ndarray:
    """KL of each token; what is kept is made of sum one, as if the tail were one token more."""
    nats = []
    for row, at, tail, logits in zip(log_p.astype(np.float64), ids, log_tail.astype(np.float64), y, strict=True):
        q = log_softmax(logits)
        others = np.setdiff1d(np.arange(len(q)), at)
        p, q = np.append(row, tail), np.append(q[at], np.logaddexp.reduce(q[others]) if len(others) else 0.0)
        p = p - np.logaddexp.reduce(p)
        nats.append(sum(np.exp(a) * (a - b) for a, b in zip(p, q, strict=True) if a > -np.inf))
    return np.array(nats)
