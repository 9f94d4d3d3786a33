"""Factors on their way from folds into weights: which column, which row, which vector is multiplied by what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from llmcomp.graph.folds import Fold
from llmcomp.graph.model import ModelGraph


@dataclass(frozen=True)
class Factors:
    """What the chosen folds do to a model. Without entries nothing changes."""

    columns: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """Layer name -> [in]: each row of the weight is multiplied by it."""
    rows: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """Layer name -> [out]: each column of the weight is multiplied by it then."""
    constants: Mapping[int, NDArray[np.float32]] = field(default_factory=dict)
    """Const layer of the skeleton -> its values divided by their factors."""
    inserted: Mapping[int, NDArray[np.float32]] = field(default_factory=dict)
    """Operation of the skeleton -> [channels]: its output is multiplied by it from now on."""

    def __contains__(self, name: str) -> bool:
        """Whether layer `name` has factors."""
        return name in self.columns or name in self.rows

    def apply(self, name: str, rows: NDArray[np.float32], numbers: Sequence[int]) -> NDArray[np.float32]:
        """Rows [R, in] of layer `name`, whose row numbers are `numbers`, times their factors."""
        if name in self.columns:
            rows = rows * self.columns[name]
        return rows * self.rows[name][list(numbers), None] if name in self.rows else rows


NO_FACTORS = Factors()


def make_factors(graph: ModelGraph, chosen: Sequence[NDArray[np.float32]], folds: Sequence[Fold]) -> Factors:
    """`chosen`: for each fold t [channels], by which its readers' columns are multiplied and its source is divided."""
    columns: dict[str, NDArray[np.float32]] = {}
    rows: dict[str, NDArray[np.float32]] = {}
    constants: dict[int, NDArray[np.float32]] = {}
    inserted: dict[int, NDArray[np.float32]] = {}
    for fold, t in zip(folds, chosen, strict=True):
        if fold.writer is not None:
            rows[fold.writer] = np.float32(1) / t
        if fold.behind is not None:
            inserted[fold.behind] = np.float32(1) / t
        for vector in fold.vectors:
            stored = np.frombuffer(graph.constant_bytes(vector.layer_id), "<f4").reshape(vector.labels.shape)
            constants[vector.layer_id] = (stored / t[vector.labels]).astype(np.float32)
        for name, labels in fold.readers.items():
            columns[name] = t[labels]
    return Factors(columns, rows, constants, inserted)
