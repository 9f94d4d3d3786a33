"""Codebooks: any ascending table of levels, times the group's largest magnitude over the table's. CB4 is NNCF's table of sixteen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from llmcomp.errors import OptionError
from llmcomp.formats.array import Namespace, guard
from llmcomp.formats.format import Format, Node, Part, largest, register, register_family

CB4 = (-3.5, -2.5, -1.875, -1.375, -1.0, -0.625, -0.3125, 0.0, 0.28125, 0.5625, 0.875, 1.125, 1.5, 2.0, 2.5, 3.5)
ADAPTIVE = "adaptive_codebook"
"""NNCF's name for sixteen levels that are fitted to the weights before these are rounded; until then they are CB4's."""
STORED = {"f8e4m3": ml_dtypes.float8_e4m3fn, "f16": np.float16, "f32": np.float32}
"""Element types of a stored table, narrowest first."""


LARGEST = 1e30
"""Bound of a table's largest level, and its inverse: a weight divided by it, and the middle of two, stay f32."""


@dataclass(frozen=True)
class Codebook(Format):
    """Code i is the i-th level. A weight halfway between two takes the lower."""

    table: tuple[float, ...] = ()
    rules: tuple[str, ...] = ("minmax", "signed")
    """minmax: a positive scale. signed: the weight of the largest magnitude lands on the positive end."""

    @property
    def table_type(self) -> str:
        """The narrowest type that holds every level exactly."""
        wide = np.asarray(self.table, np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            return next(name for name, kind in STORED.items() if np.array_equal(wide.astype(kind).astype(np.float32), wide))

    search_factors: tuple[float, ...] = (1.0, 0.9, 0.8, -1.0, -0.9, -0.8)

    @property
    def level_count(self) -> int:
        return len(self.table)

    def ranges(self, xp: Namespace, w: Any, rule: str = "minmax") -> dict[str, Any]:
        return {"scale": guard(xp, xp.divide(largest(xp, w, self.check_rule(rule)), max(map(abs, self.table))))}

    def encode(self, xp: Namespace, w: Any, scale: Any, zero_point: Any = None) -> Any:
        levels = np.asarray(self.table, np.float32)
        middles = np.float32(0.5) * (levels[1:] + levels[:-1])
        return xp.rank(xp.divide(w, scale), middles.tolist())

    def decode(self, xp: Namespace, codes: Any, scale: Any, zero_point: Any = None) -> Any:
        return xp.multiply(xp.lookup(self.table, codes), scale)

    def parts(self, shape: tuple[int, ...], group_size: int, scale_type: str = "f16") -> tuple[Part, ...]:
        return (*super().parts(shape, group_size, scale_type), Part("codebook", self.table_type, (len(self.table),), "fixed"))

    def levels(self, scale_type: str) -> Node:
        table, codes = Node("Part", attr="codebook"), Node("Part", attr="codes")
        if self.table_type != scale_type:
            table = Node("Convert", (table,), scale_type)
        return Node("Gather", (table, codes if self.code_type != "u4" else Node("Convert", (codes,), "u8")))

    def fixed(self) -> Mapping[str, NDArray[Any]]:
        stored = np.asarray(self.table, np.float32).astype(STORED[self.table_type])
        return {"codebook": stored.view(np.uint8) if self.table_type == "f8e4m3" else stored}


def make_codebook(levels: Any, name: str = "", fitted: bool = False) -> Codebook:
    """The format of a table of 2 to 65536 ascending finite numbers. Its default name spells the table: `codebook[-1,0,1]`.

    `fitted`: to a weight or some, which alone have it; the name is `adaptive_codebook[...]` then.

    Raises:
        OptionError: another number of levels, not ascending, not finite, or beyond LARGEST.
    """
    with np.errstate(over="ignore"):
        table = np.asarray(levels, np.float32).reshape(-1)
    thing = f"codebook of {table.size} levels"
    if not 2 <= table.size <= 1 << 16:
        raise OptionError(thing, "it has fewer than 2 or more than 65536", "Give a table that codes of 1 to 16 bits can index")
    if not np.isfinite(table).all() or not (table[1:] > table[:-1]).all():
        raise OptionError(thing, "they are not finite and strictly ascending", "Sort the table and remove duplicates")
    if not 1 / LARGEST <= np.abs(table).max() <= LARGEST:
        raise OptionError(
            thing, f"the largest magnitude is not between {1 / LARGEST:g} and {LARGEST:g}", "Multiply them; scales make up for it"
        )
    family, common = ("codebook", True) if not fitted else (ADAPTIVE, False)
    bits = int(table.size - 1).bit_length()
    code_type = "u4" if bits <= 4 else "u8" if bits <= 8 else "u16"
    values = tuple(table.tolist())
    spelled = f"{family}[{','.join(f'{np.float32(v)!s}' for v in values)}]"
    return Codebook(name or spelled, 4 if bits <= 4 else 8 if bits <= 8 else 16, code_type, table=values, common=common)


def _parse(text: str, fitted: bool = False) -> Codebook:
    try:
        levels = [float(item) for item in text.split(",")]
    except ValueError:
        raise OptionError(
            f"{ADAPTIVE if fitted else 'codebook'}[{text}]", "it is not a list of numbers", "Write it like codebook[-1,-0.5,0,0.5,1]"
        ) from None
    return make_codebook(levels, fitted=fitted)


register(make_codebook(CB4, "cb4"), replace(make_codebook(CB4, ADAPTIVE), best_rule="search"))
register_family("codebook", _parse)
register_family(ADAPTIVE, partial(_parse, fitted=True))
