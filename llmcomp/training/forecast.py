"""What distillation will need, before it starts: bytes of memory by what they are for, bytes of disk, rows and steps. Arithmetic on shapes alone.

Memory is anonymous: pages of a mapped checkpoint do not count. The stages follow one another, and each gives back what it had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

F32 = 4
BASE_BYTES = 640 << 20
"""The interpreter with torch, its compiler, transformers and OpenVINO, which all runs have."""
CHUNKS = 4
"""Matrices of `logits.CHUNK_BYTES` that the loss has at once."""
LAYER_COPIES = 4
"""Of a layer's weight in its backward pass: what was rounded, what came out, and the gradients of both."""
VALUE_COPIES = 3
"""Of a layer's values in its backward pass, beside what the forward pass kept."""


@dataclass(frozen=True)
class Trained:
    """A weight that is rounded while it is trained."""

    rows: int
    columns: int
    groups: int
    """In a row."""
    zeros: bool
    """Whether they have zero points."""

    @property
    def size(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True)
class Model:
    """What is trained of what, in elements."""

    parameters: int
    """Of the float model, each once."""
    vectors: int
    """Of these in norms and biases."""
    trained: Sequence[Trained]
    widest: int
    """Values of a token that the widest layer reads or gives, the head left out."""


@dataclass(frozen=True)
class Work:
    """What is done with it."""

    rank: int
    """Of adapters, 0 without them."""
    weights: bool
    """Whether float weights are trained."""
    scales: bool
    """Whether scales are trained."""
    norms: bool
    microbatch_tokens: int
    accumulated: int
    """Microbatches of a step."""
    activation_bytes: int
    """That a forward pass of a microbatch keeps."""
    logits_bytes: int
    """Of a chunk of logits."""


@dataclass(frozen=True)
class TrainingForecast:
    """Of one run of `llmcomp distill`."""

    parts: Mapping[str, int]
    """What training holds at its peak, by what it is for, bytes."""
    export_bytes: int
    """Peak memory of the start's export, 0 where that is done."""
    cache_bytes: int
    """The teacher's answers, on disk until training is finished."""
    disk_bytes: int
    """All that lies on disk together at the most, the teacher's answers among it."""
    rows: int
    held_out_rows: int
    length: int
    steps: int | None
    """None where the clock ends training."""
    operations: float | None
    """Floating-point operations of teacher, training and evaluation; None where the clock ends training."""

    @property
    def memory_bytes(self) -> int:
        """At the peak of all stages, of the whole process."""
        return max(self.export_bytes, sum(self.parts.values()))


def trainable(model: Model, work: Work) -> int:
    """Elements that the optimizer moves. Zero points stand still."""
    count = sum(one.rows * one.groups for one in model.trained) * work.scales + model.vectors * work.norms
    return count + adapters(model, work) + sum(one.size for one in model.trained) * work.weights


def adapters(model: Model, work: Work) -> int:
    """Elements of all adapters."""
    return work.rank * sum(one.rows + one.columns for one in model.trained)


def memory_parts(model: Model, work: Work) -> dict[str, int]:
    """Bytes of training at its peak. Activations and gradients: the backward pass gives up the one while it makes the other, and only with several
    microbatches in a step are both there whole."""
    count = trainable(model, work)
    gradients, largest = F32 * count, max((one.size for one in model.trained), default=0)
    scales = sum(one.rows * one.groups * (2 + one.zeros) for one in model.trained)
    layer = LAYER_COPIES * F32 * largest + VALUE_COPIES * F32 * work.microbatch_tokens * model.widest
    both = work.accumulated > 1
    return {
        "runtime": BASE_BYTES,
        "weights": F32 * model.parameters,
        "adapters": F32 * adapters(model, work),
        "scales and zero points": F32 * scales,
        "AdamW's moments": 2 * gradients,
        "gradients": gradients if both or gradients > work.activation_bytes else 0,
        "activations": work.activation_bytes if both or gradients <= work.activation_bytes else 0,
        "a layer, or logits, at a time": max(layer, CHUNKS * work.logits_bytes),
    }
