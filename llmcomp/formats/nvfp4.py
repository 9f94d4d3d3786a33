"""NVFP4: E2M1 elements, 16 to a scale that is itself E4M3 under one f32 scale for the whole weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.formats import e2m1
from llmcomp.formats.array import EPS, NUMPY, Namespace, floor_power, guard
from llmcomp.formats.format import Node, Part, grouped_shape, register
from llmcomp.formats.fp import E4M3_MAX, Fp4

SWEEP = (1.0, 1.5, 1.25, 1.12, 0.94, 0.88)
"""What a search multiplies the scale of `minmax` by before it rounds it to E4M3; with 1.5 the extreme weight lands on 4 in place of 6."""


@dataclass(frozen=True)
class NvFp4(Fp4):
    """Codes are chosen with the f32 scale of each group, as NNCF does; the scale is rounded when all of them are known."""

    def parts(self, shape: tuple[int, ...], group_size: int, scale_type: str = "f16") -> tuple[Part, ...]:
        one = (1,) * len(grouped_shape(shape, group_size))
        return (*super().parts(shape, group_size, scale_type), Part("second_order_scale", "f32", one, "scale"))

    def candidates(self, xp: Namespace, w: Any, weight: Any) -> Iterator[dict[str, Any]]:
        scale = self.ranges(xp, w)["scale"]
        for factor in SWEEP:
            wanted = guard(xp, xp.multiply(scale, factor))
            power = floor_power(xp, wanted)
            # Between 1 and 2 the step of E4M3 is the same everywhere, so the second-order scale need not be known yet.
            yield {"scale": xp.multiply(xp.from_f8e4m3(xp.to_f8e4m3(xp.divide(wanted, power))), power)}

    def scale_node(self, scale_type: str) -> Node:
        first = Node("Convert", (Node("Part", attr="scale"),), "f32")
        node = Node("Multiply", (first, Node("Part", attr="second_order_scale")))
        return node if scale_type == "f32" else Node("Convert", (node,), scale_type)

    def store_scale(self, scale: NDArray[np.float32], scale_type: str, rule: str = "minmax") -> dict[str, NDArray[Any]]:
        if rule == "minmax":
            second = max(np.float32(scale.max(initial=0.0) / np.float32(E4M3_MAX)), np.float32(EPS))
        else:
            # A search has rounded its scales to the bits of E4M3: a power of two keeps them as they are.
            second = np.ldexp(np.float32(1), int(np.frexp(scale.max(initial=EPS) / np.float32(E4M3_MAX))[1]))
        return self.store_under(scale, float(second))

    def store_under(self, scale: NDArray[np.float32], second: float) -> dict[str, NDArray[Any]]:
        """As `store_scale`, for a given scale of the whole weight. Scales that are an E4M3 times it come back as they are."""
        stored = NUMPY.to_f8e4m3(NUMPY.divide(scale, np.float32(second)))
        return {"scale": stored, "second_order_scale": np.full((1,) * scale.ndim, second, np.float32)}

    def load_scale(self, parts: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        return np.multiply(NUMPY.from_f8e4m3(parts["scale"]), parts["second_order_scale"], dtype=np.float32)


register(NvFp4("nvfp4", 4, e2m1.TYPE, group_size=16, fixed_group=True, scale_type="f8e4m3"))
