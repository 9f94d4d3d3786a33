from __future__ import annotations

import numpy as np
import pytest

from llmcomp.algorithms.sensitivity import weight_quantization_error


def textbook(w: np.ndarray) -> float:
    """1 / (largest mean squared int8_asym error of a row + eps of f32), in float64."""
    worst = 0.0
    for row in w.astype(np.float64):
        low, high = min(0.0, row.min()), max(0.0, row.max())
        scale = (high - low) / 255
        zero = np.clip(-np.rint(low / scale), 0, 255)
        back = (np.clip(np.rint(row / scale + zero), 0, 255) - zero) * scale
        worst = max(worst, float(np.mean((row - back) ** 2)))
    return 1 / (worst + 2.0**-23)


def test_the_textbook_in_tiles() -> None:
    w = np.random.default_rng(0).normal(size=(48, 96)).astype(np.float32)
    # f32 against float64: a code may differ where a quotient lies on a tie.
    assert weight_quantization_error([w]) == pytest.approx(textbook(w), rel=1e-3)
    assert weight_quantization_error([w[:16], w[16:]]) == weight_quantization_error([w])


def test_the_score_does_not_saturate_in_16_bits() -> None:
    """With f16's eps, as NNCF has it for f16 models, both would be 1024 within 1 %."""
    rng = np.random.default_rng(1)
    w = (rng.normal(size=(16, 256)) * 0.02).astype(np.float16)
    assert weight_quantization_error([w]) > 2 * weight_quantization_error([w * np.float16(4)])
