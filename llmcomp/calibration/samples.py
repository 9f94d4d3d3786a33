"""Token rows, and where they are from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
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

    def to_json(self) -> str:
        return json.dumps({**vars(self), "rows": [row.tolist() for row in self.rows]})

    @classmethod
    def from_json(cls, text: str) -> Samples:
        """What `to_json` gave."""
        told = json.loads(text)
        rows = tuple(np.array(row, np.int64) for row in told["rows"])
        return cls(told["source"], told["taken"], rows, tuple(told["warnings"]))

    def digest(self) -> str:
        """XXH3 of the rows."""
        digest = xxhash.xxh3_128()
        for row in self.rows:
            digest.update(f"{len(row)} ".encode())
            digest.update(np.ascontiguousarray(row, "<i8").data)
        return digest.hexdigest()

    def told(self) -> dict[str, Any]:
        """For the report."""
        return {"source": self.source, "taken": self.taken, "rows": self.count, "tokens": self.tokens, "xxh3_128": self.digest()}

    def __str__(self) -> str:
        lengths = {len(row) for row in self.rows}
        tokens = f" of {lengths.pop()} tokens" if len(lengths) == 1 else f", {self.tokens} tokens"
        return f"{self.count} {'sample' if self.count == 1 else 'samples'}{tokens}: {self.taken}"
