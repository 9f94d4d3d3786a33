"""NF4: sixteen levels at quantiles of the normal distribution, times the group's largest magnitude."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.formats.array import EPS, Namespace
from llmcomp.formats.format import Format, register

LEVELS = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
"""Dettmers et al. 2023 (QLoRA), appendix E; code i of the element type nf4 is level i."""

THRESHOLDS = (
    -0.84809643, -0.6106329, -0.45999527, -0.33967942, -0.2346074, -0.13791174, -0.045525018,
    0.03979015, 0.120255254, 0.20352125, 0.29201376, 0.38931254, 0.5016634, 0.6427869, 0.8614784,
)  # fmt: skip
"""Middles of neighbouring levels as NNCF and OpenVINO round them; a weight exactly on one takes the lower level."""


@dataclass(frozen=True)
class Nf4(Format):
    def quantize(self, xp: Namespace, w: Any) -> dict[str, Any]:
        largest = xp.max(xp.abs(w))
        scale = xp.where(xp.less(largest, EPS), EPS, largest)
        codes = xp.rank(xp.divide(w, scale), THRESHOLDS)
        return {"codes": xp.codes(codes, self.code_type), "scale": scale}

    def dequantize(self, parts: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        return np.multiply(LEVELS[parts["codes"]], parts["scale"], dtype=np.float32)


register(Nf4("nf4", 4, "nf4", for_embeddings=False, grouped=True))
