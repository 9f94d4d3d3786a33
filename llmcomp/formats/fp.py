"""FP4 (E2M1) and FP8 (E4M3) with a float scale: the group's largest magnitude lands on the largest value of the element type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmcomp.formats import e2m1
from llmcomp.formats.array import Namespace, guard
from llmcomp.formats.format import Format, largest, register

E4M3_MAX = 448.0


@dataclass(frozen=True)
class Fp4(Format):
    rules: tuple[str, ...] = ("minmax",)

    def ranges(self, xp: Namespace, w: Any, rule: str = "minmax") -> dict[str, Any]:
        return {"scale": guard(xp, xp.divide(largest(xp, w, self.check_rule(rule)), e2m1.MAX))}

    def encode(self, xp: Namespace, w: Any, scale: Any, zero_point: Any = None) -> Any:
        return e2m1.encode(xp, xp.divide(w, scale))

    def decode(self, xp: Namespace, codes: Any, scale: Any, zero_point: Any = None) -> Any:
        return xp.multiply(e2m1.decode(xp, codes), scale)


@dataclass(frozen=True)
class Fp8(Format):
    rules: tuple[str, ...] = ("minmax",)

    def ranges(self, xp: Namespace, w: Any, rule: str = "minmax") -> dict[str, Any]:
        return {"scale": guard(xp, xp.divide(largest(xp, w, self.check_rule(rule)), E4M3_MAX))}

    def encode(self, xp: Namespace, w: Any, scale: Any, zero_point: Any = None) -> Any:
        return xp.to_f8e4m3(xp.clip(xp.divide(w, scale), -E4M3_MAX, E4M3_MAX))

    def decode(self, xp: Namespace, codes: Any, scale: Any, zero_point: Any = None) -> Any:
        return xp.multiply(xp.from_f8e4m3(codes), scale)


register(Fp4("fp4", 4, e2m1.TYPE), Fp8("fp8_e4m3", 8, "f8e4m3", group_size=-1))
