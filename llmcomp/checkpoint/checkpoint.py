"""What every kind of source offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from llmcomp.checkpoint.encoded import Encoded

DIGESTED = 4096
"""Numbers of each tensor that `values_digest` looks at, at most."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor; `begin` and `end` are byte offsets in `file`, of one that is decoded as it is read those of its codes."""

    name: str
    dtype: str
    """As safetensors spells it: F32, F16, BF16, ..."""
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int


class Checkpoint(ABC):
    """A source whose headers have been read and checked."""

    source: str
    """As the user wrote it."""
    folder: Path | None
    """Where config.json and the tokenizer are; None for a .gguf file."""
    config: dict[str, Any]
    generation_config: dict[str, Any] | None
    tensors: Mapping[str, TensorInfo]
    plain: bool = True
    """Whether transformers' own loader finds the same values in `folder`."""
    side_files: list[Path]
    """Small files to copy into the output."""
    doubt: str | None = None
    """Why the source may not be what its user means, though it can be read."""
    open_arguments: dict[str, Any]
    """JSON-able arguments of `open` with which a child process opens the same files, without network: a hub id's snapshot, not its name."""

    @abstractmethod
    def rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows [start, stop) along the first axis, mapped or decoded now; bf16 as ml_dtypes.bfloat16."""

    def picked(self, name: str, numbers: NDArray[np.int64]) -> NDArray[Any]:
        """The rows with these numbers, a copy."""
        return self.read(name)[numbers]

    def window(self, name: str, index: int | None, rows: slice, columns: slice) -> NDArray[Any]:
        """Rows and columns of a matrix, or of matrix `index` of a stack."""
        if index is not None:
            return self.rows(name, index, index + 1)[0][rows, columns]
        start, stop, _ = rows.indices(self.tensors[name].shape[0])
        return self.rows(name, start, stop)[:, columns]

    @abstractmethod
    def prefetch(self, name: str, start: int, stop: int) -> None:
        """Ask the system to read these rows ahead; it may not."""

    def encoded(self, name: str) -> Encoded | None:
        """What is known of a tensor that is stored quantized; None for one that is stored in float, or changed on the way."""
        return None

    def read(self, name: str) -> NDArray[Any]:
        """The whole tensor."""
        shape = self.tensors[name].shape
        return self.rows(name, 0, shape[0] if shape else 1)

    @abstractmethod
    def check_tokenizer(self) -> None:
        """Raises TokenizerError if there is no tokenizer."""

    @abstractmethod
    def save_tokenizer(self, folder: Path) -> None:
        """Write the Hugging Face tokenizer files into `folder`."""

    def values_digest(self) -> str:
        """XXH3 over names, types, shapes and the first row of each tensor: the same for the same weights wherever they lie, another for a fine-tune."""
        digest = xxhash.xxh3_128()
        for name, tensor in sorted(self.tensors.items()):
            digest.update(f"{name} {tensor.dtype} {tensor.shape} ".encode())
            if 0 not in tensor.shape:
                first = self.rows(name, 0, 1) if tensor.shape else self.read(name)
                digest.update(np.ascontiguousarray(first.reshape(-1)[:DIGESTED]).view(np.uint8).data)
        return digest.hexdigest()

    @abstractmethod
    def fingerprint(self) -> str:
        """SHA-256 over the names, sizes and times of the files, and the config."""
