"""Layers to round: heavy-tailed weights, inputs with unequal channels and a common part, and inputs that have broken second-order methods."""

from __future__ import annotations

from typing import Any

import numpy as np

from llmcomp import formats
from llmcomp.algorithms.search import search
from llmcomp.formats import NUMPY


def weights(rows: int = 24, width: int = 128, seed: int = 0) -> np.ndarray:
    w = (np.random.default_rng(seed).standard_t(5, (rows, width)) * 0.02).astype(np.float32)
    w[0, :64] = 0
    return w


def inputs(width: int = 128, tokens: int = 512, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    common = rng.normal(size=(tokens, 12)) @ rng.normal(size=(12, width))
    return (rng.normal(size=(tokens, width)) + common) * np.exp(0.7 * rng.normal(size=width))


def moments(x: np.ndarray) -> np.ndarray:
    return (x.T @ x / len(x)).astype(np.float32)


def hard(width: int = 128) -> dict[str, np.ndarray]:
    """Inputs, by name."""
    dead = inputs(width)
    dead[:, [3, 70]] = 0
    loud = inputs(width)
    loud[:, 5] *= 1e3
    one = inputs(width, 1)
    return {
        "usual": inputs(width),
        "no activation": np.zeros((4, width)),
        "dead channels": dead,
        "a massive channel": loud,
        "one token": one,
        "one token four times": np.repeat(one, 4, axis=0),
        "one live channel": np.eye(width)[[9]],
    }


def given(fmt: formats.Format, w: np.ndarray, h: np.ndarray) -> dict[str, Any]:
    """Scale [and zero_point] [rows, groups, 1] of a search that knows the inputs' second moments."""
    size = formats.grouped_shape(w.shape, fmt.group_size)[-1]
    importance = np.ascontiguousarray(np.diagonal(h)).reshape(1, -1, size)
    return dict(search(NUMPY, fmt, w.reshape(len(w), -1, size), importance))


def decoded(fmt: formats.Format, codes: np.ndarray, scale: np.ndarray, zero_point: np.ndarray | None = None) -> np.ndarray:
    """[rows, in]."""
    back = fmt.decode(NUMPY, NUMPY.numbers(codes, fmt.code_type), scale, zero_point)
    return np.asarray(back).reshape(len(codes), -1)


def plain(fmt: formats.Format, w: np.ndarray, grid: dict[str, Any]) -> np.ndarray:
    """Plain rounding with the scales given, [rows, in]."""
    grouped = w.reshape(*grid["scale"].shape[:2], -1)
    return decoded(fmt, NUMPY.codes(fmt.encode(NUMPY, grouped, **grid), fmt.code_type), **grid)
