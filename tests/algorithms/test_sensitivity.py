from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmcomp.algorithms.divergence import Divergence, LogSum
from llmcomp.algorithms.sensitivity import int8_error, scores, weight_quantization_error
from llmcomp.calibration.statistics import SiteStatistics
from tests.reference import sensitivity as textbook

LENGTHS = (40, 7, 23)


def made() -> tuple[np.ndarray, list[np.ndarray]]:
    """A weight [48, 96], and samples of several lengths with channels of unlike mean and spread."""
    rng = np.random.default_rng(0)
    spread, mean = np.exp(rng.normal(size=96)), 3 * rng.normal(size=96)
    return rng.normal(size=(48, 96)).astype(np.float32), [(rng.normal(size=(n, 96)) * spread + mean).astype(np.float32) for n in LENGTHS]


def ours(w: np.ndarray, samples: list[np.ndarray]) -> dict[str, float]:
    statistics = SiteStatistics.empty(w.shape[1])
    for x in samples:
        statistics.add(x)
    return scores(int8_error([w]), **statistics.activity.means())


def test_the_textbook() -> None:
    # f32 against float64: a code may differ where a quotient lies on a tie.
    assert ours(*made()) == pytest.approx(textbook.metrics(*made()), rel=1e-3)


def test_tiles_make_no_difference() -> None:
    w, _ = made()
    whole, parts = int8_error([w]), int8_error([w[:16], w[16:]])
    assert whole.worst == parts.worst and whole.squares == pytest.approx(parts.squares, rel=1e-6)


def test_nncf_scores_the_same() -> None:
    """Its reducers over samples, one at a time as it gets them, and its error of the weight."""
    from nncf.common.tensor_statistics import collectors
    from nncf.quantization.algorithms.weight_compression.config import WeightCompressionConfig
    from nncf.quantization.algorithms.weight_compression.weight_lowering import get_integer_quantization_error
    from nncf.tensor import Tensor

    w, samples = made()

    def collected(reducer: Any, aggregator: Any) -> float:
        collector = collectors.TensorCollector()
        collector.register_statistic_branch("one", reducer, aggregator)
        for x in samples:
            collector.register_input_for_all_reducers(Tensor(x[None]))
        return float(np.mean(collector.get_statistics()["one"].data))

    mean = collectors.MeanAggregator
    seen = {
        "mean_activation_variance": collected(collectors.MeanVarianceReducer((-2,)), mean()),
        "max_activation_variance": collected(collectors.MaxVarianceReducer((-2,)), mean()),
        "mean_activation_magnitude": collected(collectors.MeanAbsMaxReducer((-2,)), mean()),
        "hessian_input_activation": collected(collectors.RawReducer(), collectors.HAWQAggregator()),
    }
    worst, norm = (get_integer_quantization_error(Tensor(w), 1, WeightCompressionConfig(), kind) for kind in ("max_mean", "frobenius"))
    weight = 1 / (worst + np.finfo(np.float32).eps)
    expected = {name: figure * (norm if name.startswith("hessian") else weight) for name, figure in seen.items()}
    # Sums of f32 in another order.
    assert ours(w, samples) == pytest.approx({"weight_quantization_error": weight, **expected}, rel=1e-4)


def test_samples_count_alike_whatever_their_order_or_batch() -> None:
    w, samples = made()
    assert ours(w, samples[::-1]) == pytest.approx(ours(w, samples), rel=1e-6)
    batch = np.stack([samples[0], 2 * samples[0]])
    assert ours(w, [batch]) == pytest.approx(ours(w, [batch[0], batch[1]]), rel=1e-6)


def test_the_score_does_not_saturate_in_16_bits() -> None:
    """With f16's eps, as NNCF has it for f16 models, both would be 1024 within 1 %."""
    rng = np.random.default_rng(1)
    w = (rng.normal(size=(16, 256)) * 0.02).astype(np.float16)
    assert weight_quantization_error(int8_error([w])) > 2 * weight_quantization_error(int8_error([w * np.float16(4)]))


@pytest.mark.parametrize("cuts", [(), (1,), (10, 64)])
def test_divergence_in_parts_of_the_vocabulary(cuts: tuple[int, ...]) -> None:
    rng = np.random.default_rng(2)
    z = (4 * rng.normal(size=(5, 100)) + 50).astype(np.float32)
    # A shift of all logits changes nothing, and the largest is not always in the first part.
    y = (z + 0.1 * rng.normal(size=z.shape) - 7).astype(np.float32)
    p, found = LogSum(5), Divergence(5)
    for a, b in zip(np.split(z, cuts, -1), np.split(y, cuts, -1), strict=True):
        found.add(p.add(a), a, b)
    # f32 sums of a hundred terms around 7.
    np.testing.assert_allclose(found.nats(p), textbook.divergence(z, y), rtol=1e-3, atol=3e-6)
    np.testing.assert_allclose(p.value, np.logaddexp.reduce(z.astype(np.float64), -1), rtol=1e-6)
