"""Integer codes whose columns share scales and zero points in groups: what GPTQ, AWQ and compressed-tensors have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp import formats
from llmcomp.checkpoint.checkpoint import TensorInfo
from llmcomp.checkpoint.encoded import LEAST_RUN, Form, Held, Lines, held, integer_formats, integer_lines, run_length
from llmcomp.checkpoint.encodings.base import ALL, DecodedTensor, Rows


class Grouped(DecodedTensor):
    """w[o, i] = (code[o, i] - zero[o, g]) · scale[o, g] with the group g of column i, rounded to float32.

    The difference is a small integer, and its product with a scale of 16 bits is exact.
    """

    def __init__(self, name: str, shape: tuple[int, ...], parts: Sequence[TensorInfo], group: NDArray[np.int64]) -> None:
        super().__init__(name, shape, parts)
        self.group = group
        """Of each column."""

    span: tuple[int, int]
    """The least and the largest code that can be stored."""

    @abstractmethod
    def codes(self, rows: Rows, columns: slice) -> NDArray[Any]:
        """(rows, columns)"""

    @abstractmethod
    def zeros(self, rows: Rows) -> NDArray[Any] | None:
        """(rows, groups); None where a code of zero is a weight of zero."""

    @abstractmethod
    def scales(self, rows: Rows) -> NDArray[Any]:
        """(rows, groups)"""

    def decode(self, index: int | None, rows: Rows, columns: slice) -> NDArray[np.float32]:
        group = self.group[columns]
        values = np.ascontiguousarray(self.codes(rows, columns), np.float32)
        zeros = self.zeros(rows)
        if zeros is not None:
            values -= self._spread(zeros, group)
        values *= self._spread(self.scales(rows), group)
        return values

    @cached_property
    def held(self) -> Held:
        size, is_sorted = run_length(self.group), False
        if size is None:
            size, is_sorted = run_length(self.group[self.order]), True
        if size is None:
            return Held((), f"fewer than {LEAST_RUN} columns share a scale")
        names = integer_formats(*self.span, self.zeros(ALL))
        return held(names, size, self.scales(ALL), is_sorted) if names else Held((), "its zero points are beyond its codes")

    @cached_property
    def order(self) -> NDArray[np.int64]:
        return np.argsort(self.group, kind="stable")

    def lines(self, form: Form, index: int | None, start: int, stop: int) -> Lines:
        rows, group = slice(start, stop), self.group[self.order] if form.sorted else self.group
        codes, zeros, scales = self.codes(rows, ALL), self.zeros(rows), self.scales(rows)
        codes = codes[:, self.order] if form.sorted else codes
        groups = group[:1] if form.group_size == -1 else group[:: form.group_size]
        per_group = (len(codes), len(groups))
        scale = np.broadcast_to(scales if scales.shape[1] == 1 else scales[:, groups], per_group)
        return integer_lines(form.format, codes, self.span[0], scale, zeros if zeros is None or zeros.shape[1] == 1 else zeros[:, groups])

    def _spread(self, values: NDArray[Any], group: NDArray[np.int64]) -> NDArray[np.float32]:
        wide = np.ascontiguousarray(values, np.float32)
        return wide if wide.shape[1] == 1 else np.take(wide, group, axis=1)


def in_order(width: int, size: int) -> NDArray[np.int64]:
    """The group of each column where `size` neighbours make one; -1 for all."""
    return np.zeros(width, np.int64) if size == -1 else np.arange(width) // size


def first_codes(words: NDArray[np.int32], bits: int, count: int) -> NDArray[np.uint8]:
    """The first `count` codes of each row of 32-bit words, the lowest bits first; a code may stand in two words."""
    words = np.ascontiguousarray(words)
    if bits in (2, 4, 8):
        whole = (len(words), words.shape[1] * 32 // bits)
        return formats.unpack(words.view(np.uint8).reshape(-1), f"u{bits}", whole)[:, :count]
    return codes_at(words, np.arange(count), bits)


def codes_at(words: NDArray[np.int32], numbers: NDArray[np.int64], bits: int) -> NDArray[np.uint8]:
    """As `first_codes`, the codes with these numbers."""
    unsigned = words.view(np.uint32)
    word, shift = np.divmod(numbers * bits, 32)
    found = unsigned[:, word] >> shift.astype(np.uint32)
    cut = np.flatnonzero(shift + bits > 32)
    if cut.size:
        found[:, cut] |= unsigned[:, word[cut] + 1] << (32 - shift[cut]).astype(np.uint32)
    return (found & np.uint32((1 << bits) - 1)).astype(np.uint8)
