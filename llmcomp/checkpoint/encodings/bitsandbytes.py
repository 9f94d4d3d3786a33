"""bitsandbytes: NF4 and FP4 in runs of the flattened weight, and LLM.int8.

Of 4 bits (`load_in_4bit`), with elements counted through the whole matrix, row after row:

weight                                   any type, (out · in / 2) bytes: two codes to a byte, the first in the high nibble
weight.quant_map                         F32 (16)          the values of the codes
weight.absmax                            F32 (runs)        what a run of `blocksize` elements is multiplied by
weight.quant_state.bitsandbytes__nf4     U8                JSON: quant_type, blocksize, shape, and of what is nested
  where absmax is U8, it is itself nested_quant_map[absmax] · nested_absmax[run // nested_blocksize] + nested_offset

Of 8 bits: weight I8 (out, in), SCB F32 (out), and w = code · (SCB / 127), the quotient rounded to float32.

Source: Dettmers et al. 2023 (arXiv 2305.14314) and 2022 (arXiv 2208.07339), and the `QuantState` of the library.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.checkpoint.checkpoint import TensorInfo
from llmcomp.checkpoint.encoded import Form, Held, Lines, held, run_length
from llmcomp.checkpoint.encodings.base import (
    MAX_GROUP,
    DecodedTensor,
    Encoding,
    Rows,
    check,
    check_finite,
    check_matrix,
    part,
    shown,
    wrong,
)
from llmcomp.checkpoint.mapped import map_bytes
from llmcomp.checkpoint.stored import stored_array
from llmcomp.errors import OptionError
from llmcomp.formats import nf4
from llmcomp.formats.codebook import make_codebook

STATE = ".quant_state.bitsandbytes__"
TYPES = ("nf4", "fp4")
RUNS, VALUES, NESTED_RUNS, NESTED_VALUES = ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"
SCB, LAYOUT = ".SCB", ".weight_format"
MAX_STATE = 10_000
"""Bytes of the JSON text, which has some two hundred."""


class BitsAndBytes(Encoding):
    methods = ("bitsandbytes",)
    suffixes = (RUNS, VALUES, NESTED_RUNS, NESTED_VALUES, SCB, *(STATE + one for one in TYPES))

    def decoded(self, tensors: Mapping[str, TensorInfo]) -> dict[str, DecodedTensor]:
        found: dict[str, DecodedTensor] = {}
        for name, info in tensors.items():
            if STATE in name:
                weight = name.split(STATE)[0]
                found[weight] = self._runs(weight, info, tensors)
            elif name.endswith(SCB):
                stem = name.removesuffix(SCB)
                found[f"{stem}.weight"] = self._bytes(stem, info, tensors)
        return found

    def _bytes(self, stem: str, scale: TensorInfo, tensors: Mapping[str, TensorInfo]) -> DecodedTensor:
        codes = check_matrix(part(tensors, f"{stem}.weight", scale, ("I8",)))
        check_finite(check(scale, ("F32",), codes.shape[:1], (1, *codes.shape[:1]), (*codes.shape[:1], 1)))
        parts = [codes, scale]
        if stem + LAYOUT in tensors:
            layout = check(tensors[stem + LAYOUT], ("U8",), (), (1,))
            if stored_array(layout).any():
                raise wrong(layout, f"layout {int(stored_array(layout).reshape(-1)[0])} is not read, only 0, rows")
            parts.append(layout)
        return _Bytes(f"{stem}.weight", codes.shape, parts)

    def _runs(self, name: str, info: TensorInfo, tensors: Mapping[str, TensorInfo]) -> DecodedTensor:
        state = _state(info)
        codes = part(tensors, name, info, ("U8", "I8", "F16", "BF16", "F32"))
        shape, size = state["shape"], state["blocksize"]
        count = math.prod(shape)
        if (codes.end - codes.begin) * 2 != count or shape[1] % 2:
            raise wrong(codes, f"its {codes.end - codes.begin} bytes are no {list(shape)} codes of 4 bits in rows of whole bytes")
        values = check_finite(part(tensors, name + VALUES, codes, ("F32",), (16,)))
        runs = part(tensors, name + RUNS, codes, ("U8", "F32"), (-(-count // size),))
        parts = [codes, runs, values, info]
        if runs.dtype == "F32":
            check_finite(runs)
            return _Runs(name, shape, parts, size, None, state)
        second = -(-runs.shape[0] // state["nested_blocksize"])
        nested = part(tensors, name + NESTED_RUNS, codes, ("F32",), (second,)), part(tensors, name + NESTED_VALUES, codes, ("F32",), (256,))
        for one in nested:
            check_finite(one)
        return _Runs(name, shape, [*parts, *nested], size, nested, state)


class _Bytes(DecodedTensor):
    def __init__(self, name: str, shape: tuple[int, ...], parts: list[TensorInfo]) -> None:
        super().__init__(name, shape, parts)
        self.stored = parts

    def decode(self, index: int | None, rows: Rows, columns: slice) -> NDArray[np.float32]:
        return stored_array(self.stored[0])[rows, columns] * self._scale()[rows, None]

    @cached_property
    def held(self) -> Held:
        return held(["int8_sym"], -1, self._scale())

    def lines(self, form: Form, index: int | None, start: int, stop: int) -> Lines:
        return Lines(stored_array(self.stored[0])[start:stop], self._scale()[start:stop, None])

    def _scale(self) -> NDArray[np.float32]:
        return np.divide(stored_array(self.stored[1]).reshape(-1), np.float32(127), dtype=np.float32)


class _Runs(DecodedTensor):
    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        parts: list[TensorInfo],
        size: int,
        nested: tuple[TensorInfo, TensorInfo] | None,
        state: Mapping[str, Any],
    ) -> None:
        super().__init__(name, shape, parts)
        self.stored, self.size, self.nested, self.state = parts, size, nested, state

    def decode(self, index: int | None, rows: Rows, columns: slice) -> NDArray[np.float32]:
        out, width = self.info.shape
        values: NDArray[np.float32] = stored_array(self.stored[2])[self._codes(rows)[:, columns]]
        first, last, _ = columns.indices(width)
        numbers = np.arange(out)[rows]
        if width % self.size == 0:
            # Whole runs in each row: as many multipliers as runs.
            per = width // self.size
            factors = np.repeat(self._factors(numbers[:, None] * per + np.arange(per)), self.size, axis=1)[:, columns]
        else:
            factors = self._factors((numbers[:, None] * width + np.arange(first, last)) // self.size)
        values *= factors
        return values

    def _codes(self, rows: Rows) -> NDArray[np.uint8]:
        out, width = self.info.shape
        pairs = map_bytes(self.info.file, self.info.begin, self.info.end, private=False).reshape(out, width // 2)[rows]
        return np.stack([pairs >> 4, pairs & 15], axis=-1).reshape(len(pairs), width)

    @cached_property
    def held(self) -> Held:
        out, width = self.info.shape
        size = run_length(np.arange(width) // math.gcd(width, self.size))
        if size is None:
            return Held((), f"runs of {self.size} weights begin and end in the middle of rows of {width}")
        table = stored_array(self.stored[2])
        try:
            name = "nf4" if np.array_equal(table, np.asarray(nf4.LEVELS, np.float32)) else make_codebook(np.unique(table)).name
        except OptionError as error:
            return Held((), f"its table of values is none of ours: {error.reason}")
        return held([name], size, self._factors(np.arange(-(-out * width // self.size))))

    def lines(self, form: Form, index: int | None, start: int, stop: int) -> Lines:
        width, codes = self.info.shape[1], self._codes(slice(start, stop))
        if form.format != "nf4":
            table = stored_array(self.stored[2])
            # Of equal values, such as both zeros, one is left.
            codes = np.searchsorted(np.unique(table), table).astype(np.uint8)[codes]
        firsts = np.arange(0, width, width if form.group_size == -1 else form.group_size)
        return Lines(codes, self._factors((np.arange(start, stop)[:, None] * width + firsts) // self.size))

    def _factors(self, runs: NDArray[np.int64]) -> NDArray[np.float32]:
        """What the elements of these runs are multiplied by."""
        found = stored_array(self.stored[1])[runs]
        if self.nested is None:
            return found
        second, values = (stored_array(one) for one in self.nested)
        with np.errstate(over="ignore", invalid="ignore"):
            return values[found] * second[runs // self.state["nested_blocksize"]] + np.float32(self.state["nested_offset"])


def _state(info: TensorInfo) -> dict[str, Any]:
    """The JSON text of a quantization state, with what of it is used checked."""
    check(info, ("U8",))
    kind = info.name.split(STATE)[1]
    if kind not in TYPES:
        raise wrong(info, f"type {kind} is not read, only {', '.join(TYPES)}")
    if info.end - info.begin > MAX_STATE:
        raise wrong(info, "it is no short JSON text")
    try:
        state = json.loads(stored_array(info).tobytes())
    except (ValueError, RecursionError):
        raise wrong(info, "it is no JSON") from None
    if not isinstance(state, dict):
        raise wrong(info, "it is no JSON object")
    shape, offset = state.get("shape"), state.get("nested_offset", 0.0)
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int and 0 < n < 1 << 40 for n in shape):
        raise wrong(info, f"shape {shown(shape)} is no matrix")
    sizes = {name: state.get(name, 256) for name in ("blocksize", "nested_blocksize")}
    for name, size in sizes.items():
        if type(size) is not int or not 0 < size <= MAX_GROUP:
            raise wrong(info, f"{name} {shown(size)} is no size")
    if state.get("quant_type") != kind:
        raise wrong(info, f"quant_type {shown(state.get('quant_type'))} is not {kind}")
    if type(offset) not in (int, float) or not math.isfinite(offset):
        raise wrong(info, f"nested_offset {shown(offset)} is no number")
    return {"shape": tuple(shape), "nested_offset": offset, **sizes}
