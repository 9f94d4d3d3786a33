"""What every encoding offers, and the checks that all of them make of their parts when a checkpoint is opened."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from llmcomp.checkpoint.checkpoint import TensorInfo
from llmcomp.checkpoint.encoded import Encoded
from llmcomp.checkpoint.mapped import read_ahead
from llmcomp.checkpoint.stored import stored_array
from llmcomp.errors import CheckpointError

DAMAGED = "Download or copy the checkpoint again"
FLOAT = "Give the original float checkpoint"
FLOATS = ("F32", "F16", "BF16")
LOOKED_AT = 1 << 22
"""Scales of one tensor that are looked at when opening: all of a matrix's; those of a large stack that are beyond are found as they stream."""
MAX_GROUP = 1 << 30

Rows = slice | NDArray[np.int64]
ALL = slice(None)


class DecodedTensor(Encoded):
    """A matrix (out, in) of the plain architecture, or a stack of matrices, made of its stored parts whenever somebody looks; float32."""

    turned: ClassVar[bool] = False
    """Rows of the matrix are columns of what is stored."""

    def __init__(self, name: str, shape: tuple[int, ...], parts: Sequence[TensorInfo]) -> None:
        self.info = TensorInfo(name, "F32", shape, parts[0].file, parts[0].begin, parts[0].end)
        """As of a stored tensor; the bytes are those of the first part, which holds the codes."""
        self.parts = tuple(part.name for part in parts)
        """Stored tensors that it takes the place of."""

    @abstractmethod
    def decode(self, index: int | None, rows: Rows, columns: slice) -> NDArray[np.float32]:
        """As `window`; what float32 cannot hold is infinite."""

    def window(self, index: int | None, rows: Rows, columns: slice) -> NDArray[np.float32]:
        """Rows and columns of the matrix, or of matrix `index` of the stack."""
        # What is infinite is found where all weights are looked at for it.
        with np.errstate(over="ignore", invalid="ignore"):
            return self.decode(index, rows, columns)

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows [start, stop) of the matrix, or matrices of the stack."""
        start, stop, _ = slice(start, stop).indices(self.info.shape[0])
        if len(self.info.shape) == 2:
            return self.window(None, slice(start, max(start, stop)), slice(None))
        found = np.empty((max(stop - start, 0), *self.info.shape[1:]), np.float32)
        for i in range(len(found)):
            found[i] = self.window(start + i, slice(None), slice(None))
        return found

    def picked(self, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        """The rows, or matrices, with these numbers."""
        if len(self.info.shape) == 2:
            return self.window(None, numbers, slice(None))
        return np.concatenate([self.rows(int(i), int(i) + 1) for i in numbers])

    def prefetch(self, start: int, stop: int) -> None:
        """Ask the system to read what these rows are made of ahead."""
        info = self.info
        size = (info.end - info.begin) / max(info.shape[0], 1)
        if not self.turned:
            read_ahead(info.file, info.begin + math.floor(start * size), info.begin + math.ceil(stop * size))
        elif start == 0:
            read_ahead(info.file, info.begin, info.end)


class Encoding(ABC):
    """One way of storing weights, with the settings of one checkpoint."""

    methods: ClassVar[tuple[str, ...]] = ()
    """What `quant_method` may say for it."""
    suffixes: ClassVar[tuple[str, ...]] = ()
    """Ends of the names of its parts; what has such a name and belongs to nothing is an error."""

    def __init__(self, settings: Mapping[str, Any], config: Path) -> None:
        self.settings, self.config = settings, config

    @abstractmethod
    def decoded(self, tensors: Mapping[str, TensorInfo]) -> dict[str, DecodedTensor]:
        """Plain name -> what stands for it, for everything that is stored in this encoding.

        Raises:
            CheckpointError: parts are missing, are not of the type or shape that they must have, or hold what cannot be.
        """

    def refused(self, reason: str) -> CheckpointError:
        """The error for settings that are not read."""
        return CheckpointError(str(self.config), f"quantization_config: {reason}", FLOAT)

    def setting(self, *names: str, default: Any = None) -> Any:
        """The first of these settings that is there."""
        return next((self.settings[name] for name in names if self.settings.get(name) is not None), default)

    def number(self, *names: str, default: int | None, allowed: Sequence[int]) -> int:
        """An integer setting."""
        value = self.setting(*names, default=default)
        if type(value) is not int or value not in allowed:
            told = ", ".join(str(one) for one in allowed) if len(allowed) < 20 else f"{allowed[0]} ... {allowed[-1]}"
            raise self.refused(f"{names[0]} {shown(value)} is not read, only {told}")
        return value

    def group_size(self, *names: str) -> int:
        """Columns that share a scale; -1 for all of them."""
        value = self.setting(*names, default=-1)
        if type(value) is not int or not (value == -1 or 0 < value <= MAX_GROUP):
            raise self.refused(f"{names[0]} {shown(value)} is no size")
        return value


def shown(value: Any) -> str:
    """Something of a config, fit for a message."""
    return ascii(value)[:80]


def wrong(info: TensorInfo, reason: str) -> CheckpointError:
    """The error for a tensor that is not what its encoding needs."""
    return CheckpointError(f"{info.file}: tensor {info.name}", reason, DAMAGED)


def check(info: TensorInfo, kinds: Sequence[str], *shapes: tuple[int, ...]) -> TensorInfo:
    """`info`, which must be of one of these types and, where shapes are given, of one of them."""
    if info.dtype not in kinds:
        raise wrong(info, f"it is {info.dtype}, where its encoding has {' or '.join(kinds)}")
    if shapes and info.shape not in shapes:
        raise wrong(info, f"its shape is {list(info.shape)}, what it belongs to needs {' or '.join(str(list(s)) for s in shapes)}")
    return info


def part(tensors: Mapping[str, TensorInfo], name: str, of: TensorInfo, kinds: Sequence[str], *shapes: tuple[int, ...]) -> TensorInfo:
    """The tensor `name`, without which `of` cannot be decoded."""
    if name not in tensors:
        raise wrong(of, f"{name}, which it is decoded with, is not in the checkpoint")
    return check(tensors[name], kinds, *shapes)


def check_matrix(info: TensorInfo) -> TensorInfo:
    """`info`, which must be a matrix with something in it."""
    if len(info.shape) != 2 or 0 in info.shape:
        raise wrong(info, f"its shape {list(info.shape)} is no matrix")
    return info


def check_finite(info: TensorInfo) -> TensorInfo:
    """`info`, of which no scale may be NaN or infinite."""
    flat = stored_array(info).reshape(-1)[:LOOKED_AT]
    finite = np.isfinite(flat.astype(np.float32))
    if not finite.all():
        raise wrong(info, f"scale {int(np.argmin(finite))} is NaN or infinite")
    return info


def check_groups(info: TensorInfo, groups: int) -> NDArray[np.int64]:
    """The values of `info`, which says the group of each column."""
    found = stored_array(info).astype(np.int64)
    bad = (found < 0) | (found >= groups)
    if bad.any():
        at = int(np.argmax(bad))
        raise wrong(info, f"column {at} is said to be in group {found[at]} of {groups}")
    return found
