"""What a trace may take, by what the checkpoint holds: its config is untrusted, and may ask for any number of layers of any size."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from llmcomp.checkpoint import Checkpoint
from llmcomp.errors import ArchitectureError, LlmcompError

LAYERS = re.compile(r"(num|n)(_hidden|_decoder|_encoder)?_layers?")
"""How configs call their number of layers."""
POSITIVE = {"vocab_size", "hidden_size", "n_embd", "d_model"}
NATURAL = {
    *(
        "intermediate_size",
        "moe_intermediate_size",
        "n_inner",
        "ffn_dim",
        "head_dim",
        "num_attention_heads",
        "num_key_value_heads",
        "n_head",
    ),
    *("num_experts", "num_local_experts", "n_routed_experts"),
}
"""How they call what is an axis of a tensor or divides one; some architectures have none of them."""
PARTS = 4
"""Parameters that are made of one tensor, at most: transformers cuts what is stored fused into two or three."""
TIED = 64
"""Parameters beyond that, which share their values with others."""
SPARE_BYTES = 2 << 30
THREAD_BYTES = 64 << 20
"""For each core: threads have stacks, and memory of their own to hand out."""
WEIGHT_BYTES = 16
"""For each weight: it is never held in f32 more than four times, however the model is built."""
SPARE_SECONDS = 600
TENSOR_SECONDS = 5
"""An order of magnitude more than a trace takes on two old cores."""


def config_error(checkpoint: Checkpoint, reason: str) -> ArchitectureError:
    """The error for a config that says what cannot be."""
    thing = checkpoint.source if checkpoint.folder is None else str(Path(checkpoint.source) / "config.json")
    return ArchitectureError(thing, reason, "Check it against the weights, or download or copy it again")


def one_line(told: object) -> str:
    """What an error of others says, fit for a message."""
    # What torch says goes on with its own call stack.
    text = " ".join(str(told).partition("Exception raised from")[0].split()) or type(told).__name__
    return "".join(c if c.isprintable() else "?" for c in text[:300]) + ("..." if len(text) > 300 else "")


def check_sizes(checkpoint: Checkpoint) -> None:
    """The config's sizes are such that tensors of these sizes can hold a model of them.

    Raises:
        ArchitectureError: the field, its value, and what there is.
    """
    count, largest = len(checkpoint.tensors), max((prod(tensor.shape) for tensor in checkpoint.tensors.values()), default=0)
    nested = [value for value in checkpoint.config.values() if isinstance(value, dict)]
    for name, value in (pair for place in (checkpoint.config, *nested) for pair in place.items()):
        if type(value) not in (int, float):
            continue
        if LAYERS.fullmatch(name) and not 0 < value <= count:
            raise config_error(checkpoint, f"{name} is {str(value)[:40]}, and the checkpoint holds {count} tensors")
        if name in POSITIVE | NATURAL and not (1 if name in POSITIVE else 0) <= value <= largest:
            raise config_error(checkpoint, f"{name} is {str(value)[:40]}, and the largest tensor holds {largest} numbers")


def seconds(checkpoint: Checkpoint) -> float:
    """How long a trace may take."""
    return SPARE_SECONDS + TENSOR_SECONDS * len(checkpoint.tensors)


def limit_memory(checkpoint: Checkpoint) -> None:
    """Let this process take no more memory of its own than any trace of `checkpoint` could, where the system counts it (Linux)."""
    if sys.platform != "linux":
        return
    import resource

    weights = sum(prod(tensor.shape) for tensor in checkpoint.tensors.values())
    taken = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5]) * resource.getpagesize()
    wanted = taken + SPARE_BYTES + THREAD_BYTES * (os.cpu_count() or 1) + WEIGHT_BYTES * weights
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [one for one in (wanted, soft, hard) if one != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))


NO_MEMORY = "it asks for more memory than any model of these weights takes"


def is_memory(error: BaseException) -> bool:
    """Whether memory was asked for that is not there; torch has no type of its own for it."""
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


@contextmanager
def bounded_parameters(checkpoint: Checkpoint) -> Iterator[None]:
    """A model is built of the config in this block, with no more parameters than the tensors can be.

    Raises:
        ArchitectureError: one is larger than all tensors together, there are many more than tensors, or nothing can be built.
    """
    from torch import nn

    weights = sum(prod(tensor.shape) for tensor in checkpoint.tensors.values())
    limit = PARTS * len(checkpoint.tensors) + TIED
    count = 0
    before = nn.Module.register_parameter

    def register(module: Any, name: str, parameter: Any) -> None:
        nonlocal count
        before(module, name, parameter)
        if parameter is None:
            return
        count += 1
        if parameter.numel() > weights:
            asked = (
                f"{type(module).__name__}.{name} of shape {list(parameter.shape)}, more than the {weights} numbers of all tensors together"
            )
        elif count > limit:
            asked = f"more than {limit} parameters, and the checkpoint holds {len(checkpoint.tensors)} tensors"
        else:
            return
        raise config_error(checkpoint, f"it asks for {asked}")

    nn.Module.register_parameter = register
    try:
        yield
    except LlmcompError:
        raise
    except Exception as error:
        told = NO_MEMORY if is_memory(error) else f"no model can be built of it ({type(error).__name__}: {one_line(error)})"
        raise config_error(checkpoint, told) from error
    finally:
        nn.Module.register_parameter = before
