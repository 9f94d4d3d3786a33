"""NVFP4: E2M1 elements, 16 to a scale that is itself E4M3 under one f32 scale for the whole weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.formats import e2m1
from llmcomp.formats.array import EPS, NUMPY
from llmcomp.formats.format import Node, Part, grouped_shape, register
from llmcomp.formats.fp import E4M3_MAX, Fp4


@dataclass(frozen=True)
class NvFp4(Fp4):
    """Codes are chosen with the f32 scale of each group, as NNCF does; the scale is rounded when all of them are known."""

    def parts(self, shape: tuple[int, ...], group_size: int, scale_type: str = "f16") -> tuple[Part, ...]:
        one = (1,) * len(grouped_shape(shape, group_size))
        return (*super().parts(shape, group_size, scale_type), Part("second_order_scale", "f32", one, "scale"))

    def scale_node(self, scale_type: str) -> Node:
        first = Node("Convert", (Node("Part", attr="scale"),), "f32")
        node = Node("Multiply", (first, Node("Part", attr="second_order_scale")))
        return node if scale_type == "f32" else Node("Convert", (node,), scale_type)

    def store_scale(self, scale: NDArray[np.float32], scale_type: str) -> dict[str, NDArray[Any]]:
        second = np.float32(scale.max(initial=0.0) / np.float32(E4M3_MAX))
        second = max(second, np.float32(EPS))
        stored = NUMPY.to_f8e4m3(NUMPY.divide(scale, second))
        return {"scale": stored, "second_order_scale": np.full((1,) * scale.ndim, second, np.float32)}

    def load_scale(self, parts: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        return np.multiply(NUMPY.from_f8e4m3(parts["scale"]), parts["second_order_scale"], dtype=np.float32)


register(NvFp4("nvfp4", 4, e2m1.TYPE, group_size=16, fixed_group=True, scale_type="f8e4m3"))
