"""Token rows, and where they are from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Samples:
    """Rows of token ids, each [1 to sequence_length], without padding: every token counts."""

    source: str
    taken: str
    """What the rows are, in words."""
    rows: tuple[NDArray[np.int64], ...]
    warnings: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return len(self.rows)

    @property
    def tokens(self) -> int:
        return sum(len(row) for row in self.rows)

    def __str__(self) -> str:
        lengths = {len(row) for row in self.rows}
        tokens = f" of {lengths.pop()} tokens" if len(lengths) == 1 else f", {self.tokens} tokens"
        return f"{self.count} {'sample' if self.count == 1 else 'samples'}{tokens}: {self.taken}"
