"""A weight matrix in use, as the plan sees it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Layer:
    """One weight of the graph: where it comes from and who reads it.

    `shape` is (out, in), whatever the order of axes in the checkpoint; a stack of experts has leading axes.
    """

    name: str
    """Checkpoint tensor name without `.weight`."""
    tensor: str
    """Checkpoint tensor name."""
    shape: tuple[int, ...]
    ops: tuple[str, ...]
    """Types of the operations that read it: ("Gather", "MatMul") for a table tied to the last layer."""
    nodes: tuple[str, ...]
    """Friendly names of these operations."""
    dtype: str
    """Source type, in safetensors' spelling."""
    block: int | None
    """Index of the decoder block, None outside."""
    order: int
    """Topological position of the first reader."""
    last: bool
    """Read by the last MatMul of the model."""
    transposed: bool
    """Stored (in, out) in the checkpoint."""
    vision: bool = False
    """In a model, or a submodel, that is no text model: one that reads pixels, or what another one has made of them."""

    @property
    def size(self) -> int:
        """Number of weights."""
        return prod(self.shape)
