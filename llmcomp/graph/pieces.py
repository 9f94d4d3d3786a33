"""What a weight of the graph is made of: matrices, each of rows of stored tensors.

A matrix of an architecture may be a stored tensor, rows of one, several below each other, or one of a stack: fused experts, of which checkpoints
store each by itself, and merged projections. Values are never merged: rows are read from where they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.checkpoint import Checkpoint

ALL = slice(None)


@dataclass(frozen=True)
class Piece:
    """Rows of a matrix."""

    tensor: str
    rows: int
    start: int = 0
    """First row in the stored matrix."""
    index: int | None = None
    """Which matrix of a stored stack."""
    transposed: bool = False
    """Rows of the piece are columns of what is stored."""

    def read(self, checkpoint: Checkpoint, start: int, stop: int, columns: slice = ALL) -> NDArray[Any]:
        """Rows [start, stop) of the piece."""
        rows = slice(self.start + start, self.start + stop)
        if self.transposed:
            return np.ascontiguousarray(checkpoint.window(self.tensor, self.index, columns, rows).T)
        if self.index is None and columns == ALL:
            return checkpoint.rows(self.tensor, rows.start, rows.stop)
        return checkpoint.window(self.tensor, self.index, rows, columns)


@dataclass(frozen=True)
class Pieces:
    """Matrices of equal shape, each of pieces below each other."""

    matrices: tuple[tuple[Piece, ...], ...]

    @classmethod
    def of(cls, tensor: str, shape: Sequence[int]) -> Pieces:
        """A stored matrix or vector, or a stored stack of matrices."""
        if len(shape) < 3:
            return cls(((Piece(tensor, shape[0] if shape else 1),),))
        return cls(tuple((Piece(tensor, shape[1], index=i),) for i in range(shape[0])))

    @classmethod
    def from_json(cls, value: Sequence[Sequence[Sequence[Any]]]) -> Pieces:
        return cls(tuple(tuple(Piece(*piece) for piece in matrix) for matrix in value))

    def to_json(self) -> list[list[list[Any]]]:
        return [[list(astuple(piece)) for piece in matrix] for matrix in self.matrices]

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of what is read, each once."""
        return tuple(dict.fromkeys(piece.tensor for matrix in self.matrices for piece in matrix))

    @property
    def whole(self) -> str | None:
        """The one stored matrix that this is, as it is."""
        piece = self.matrices[0][0]
        return piece.tensor if self == Pieces(((Piece(piece.tensor, piece.rows),),)) else None

    @property
    def height(self) -> int:
        """Rows of each matrix."""
        return sum(piece.rows for piece in self.matrices[0])

    def shape(self, checkpoint: Checkpoint) -> tuple[int, ...]:
        """Of what the pieces make."""
        piece = self.matrices[0][0]
        stored = checkpoint.tensors[piece.tensor].shape
        if self == Pieces.of(piece.tensor, stored):
            return stored
        stack = (len(self.matrices),) if piece.index is not None or len(self.matrices) > 1 else ()
        return (*stack, self.height, *(stored[-2:-1] if piece.transposed else stored[-1:] if len(stored) > 1 else ()))

    def values(self, checkpoint: Checkpoint) -> NDArray[Any]:
        """All of it, in memory."""
        tensor = self.tensors[0]
        if len(self.tensors) == 1 and self == Pieces.of(tensor, checkpoint.tensors[tensor].shape):
            return checkpoint.read(tensor)
        return self.read(checkpoint, 0, len(self.matrices) * self.height).reshape(self.shape(checkpoint))

    def halves(self) -> tuple[Pieces, Pieces]:
        """The upper and the lower half of each matrix."""
        middle = self.height // 2
        upper, lower = (
            tuple(tuple(_cut(matrix, start, stop)) for matrix in self.matrices) for start, stop in ((0, middle), (middle, self.height))
        )
        return Pieces(upper), Pieces(lower)

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> NDArray[Any]:
        """Rows [start, stop) of all matrices below each other, without a copy where they are one stored run."""
        found, height = [], self.height
        while start < stop:
            matrix, row = divmod(start, height)
            for piece in _cut(self.matrices[matrix], row, min(height, row + stop - start)):
                found.append(piece.read(checkpoint, 0, piece.rows))
                start += piece.rows
        return found[0] if len(found) == 1 else np.concatenate(found)

    def columns(self, checkpoint: Checkpoint, start: int, stop: int, width: int) -> NDArray[Any]:
        """As `read`, of the matrices turned around, each of `width` columns."""
        found = []
        while start < stop:
            matrix, column = divmod(start, width)
            end = min(width, column + stop - start)
            parts = [piece.read(checkpoint, 0, piece.rows, slice(column, end)) for piece in self.matrices[matrix]]
            found.append(np.ascontiguousarray((parts[0] if len(parts) == 1 else np.concatenate(parts)).T))
            start += end - column
        return found[0] if len(found) == 1 else np.concatenate(found)

    def prefetch(self, checkpoint: Checkpoint, start: int, stop: int) -> None:
        """Ask the system to read rows [start, stop) ahead."""
        while start < stop:
            matrix, row = divmod(start, self.height)
            for piece in _cut(self.matrices[matrix], row, min(self.height, row + stop - start)):
                if piece.index is not None:
                    checkpoint.prefetch(piece.tensor, piece.index, piece.index + 1)
                elif not piece.transposed:
                    checkpoint.prefetch(piece.tensor, piece.start, piece.start + piece.rows)
                start += piece.rows


def _cut(matrix: Sequence[Piece], start: int, stop: int) -> Iterator[Piece]:
    """Rows [start, stop) of a matrix."""
    position = 0
    for piece in matrix:
        low, high = max(start - position, 0), min(stop - position, piece.rows)
        if low < high:
            yield Piece(piece.tensor, high - low, piece.start + low, piece.index, piece.transposed)
        position += piece.rows
