"""The experts of a mixture, each run on the tokens that are routed to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from llmcomp.calibration.runner import PROPERTIES
from llmcomp.graph.mixtures import BIAS, EXPERT, TOKENS, Mixture

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Routed:
    """What a mixture reads of a batch."""

    tokens: Floats
    """[tokens, in]"""
    routing: Floats
    """[tokens, experts], zero where a token does not go."""


class Experts:
    """One compiled expert, which takes the weights of any."""

    def __init__(self, mixture: Mixture) -> None:
        self.mixture = mixture
        self._request = ov.Core().compile_model(mixture.expert, "CPU", PROPERTIES).create_infer_request()
        self._transposed = {layer.name: layer.transposed for layer in mixture.stacks}

    def run(self, expert: int, weights: Mapping[str, Floats], x: Floats) -> tuple[Floats, list[Floats]]:
        """What an expert with these weights [out, in] makes of x [tokens, in]: [tokens, out], and what each site of its stacks reads [tokens, .]."""
        feed = {TOKENS: np.ascontiguousarray(x)[None]}
        for name, w in weights.items():
            feed[EXPERT + name] = np.ascontiguousarray(w.T if self._transposed[name] else w)[None]
        for i, bias in enumerate(self.mixture.biases):
            feed[f"{BIAS}{i}"] = bias[expert][None]
        self._request.infer(feed, share_inputs=True)
        out, *sites = (self._request.get_output_tensor(i).data[0].copy() for i in range(1 + len(self.mixture.sites)))
        return out, sites


def routed_to(expert: int, batches: Sequence[Routed]) -> list[NDArray[np.int64]]:
    """Of each batch the numbers of the tokens that go to an expert."""
    return [np.flatnonzero(batch.routing[:, expert]) for batch in batches]


def gather(batches: Sequence[Routed], chosen: Sequence[NDArray[np.int64]]) -> Floats:
    """Those tokens of all batches [tokens, in]."""
    return np.concatenate([batch.tokens[i] for batch, i in zip(batches, chosen, strict=True)])


def spread(expert: int, batches: Sequence[Routed], chosen: Sequence[NDArray[np.int64]], y: Floats, sums: Sequence[Floats]) -> None:
    """Add what an expert gives for those tokens to the sums of each batch, weighed by the routing."""
    start = 0
    for batch, i, total in zip(batches, chosen, sums, strict=True):
        total[i] += batch.routing[i, expert][:, None] * y[start : start + len(i)]
        start += len(i)
