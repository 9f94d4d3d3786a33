"""NF4: sixteen levels at quantiles of the normal distribution, times the group's largest magnitude."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmcomp.formats.array import Namespace, guard
from llmcomp.formats.format import Format, largest, register

LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Dettmers et al. 2023 (QLoRA), appendix E; code i of the element type nf4 is level i."""

THRESHOLDS = (
    -0.84809643, -0.6106329, -0.45999527, -0.33967942, -0.2346074, -0.13791174, -0.045525018,
    0.03979015, 0.120255254, 0.20352125, 0.29201376, 0.38931254, 0.5016634, 0.6427869, 0.8614784,
)  # fmt: skip
"""Middles of neighbouring levels as NNCF and OpenVINO round them; a weight exactly on one takes the lower level."""


@dataclass(frozen=True)
class Nf4(Format):
    rules: tuple[str, ...] = ("minmax", "signed")
    """minmax: a positive scale. signed: the weight of the largest magnitude lands on +1, the end where levels lie wider."""

    search_factors: tuple[float, ...] = (1.0, 0.9, 0.8, -1.0, -0.9, -0.8)

    def ranges(self, xp: Namespace, w: Any, rule: str = "minmax") -> dict[str, Any]:
        return {"scale": guard(xp, largest(xp, w, self.check_rule(rule)))}

    def encode(self, xp: Namespace, w: Any, scale: Any, zero_point: Any = None) -> Any:
        return xp.rank(xp.divide(w, scale), THRESHOLDS)

    def decode(self, xp: Namespace, codes: Any, scale: Any, zero_point: Any = None) -> Any:
        return xp.multiply(xp.lookup(LEVELS, codes), scale)


register(Nf4("nf4", 4, "nf4"))
