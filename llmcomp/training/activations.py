"""What autograd keeps of a forward pass, counted by running the architecture on tensors without data: its own forward code says it, whatever the model."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from llmcomp.checkpoint import Checkpoint
from llmcomp.training.logits import vocabulary_of
from llmcomp.training.quantized import recomputing


@dataclass(frozen=True)
class Architecture:
    """What its own code says of a model."""

    kept_bytes: int
    """Between the forward and the backward pass of a microbatch, the head's logits left out, every linear weight recomputed. With gradient checkpointing
    these are the inputs of the blocks, and what one block keeps while its own backward pass runs."""
    parameters: int
    """Elements, tied ones once."""
    vectors: int
    """Of these in norms and biases."""
    vocabulary: int
    widest: int
    """Values of a token that the widest linear layer reads or gives, the head left out."""


def look(checkpoint: Checkpoint, rows: int, length: int, bf16: bool, checkpointing: bool, trust_remote_code: bool = False) -> Architecture:
    """The model of `checkpoint` and what it keeps of rows x length tokens that it is trained on."""
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory() as scratch:
        folder = checkpoint.folder
        if folder is None or not checkpoint.plain:
            folder = Path(scratch)
            (folder / "config.json").write_text(json.dumps(checkpoint.config), encoding="utf8")
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    whole = _run(config, rows, length, bf16, False, trust_remote_code)
    if not checkpointing:
        return whole
    inputs = _run(config, rows, length, bf16, True, trust_remote_code)
    blocks = max(1, int(config.get_text_config().num_hidden_layers))
    return replace(whole, kept_bytes=inputs.kept_bytes + whole.kept_bytes // blocks)


@contextmanager
def _as_if_run() -> Iterator[None]:
    """transformers takes tensors without data for a trace, to which it gives a causal mask, and with it keys and values of every head, instead of none."""
    from transformers import masking_utils

    known = masking_utils.find_packed_sequence_indices, masking_utils.is_tracing
    # Rows are one sequence each, which is what it would find, had they data.
    masking_utils.find_packed_sequence_indices = lambda *_, **__: None
    masking_utils.is_tracing = lambda *_: False
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices, masking_utils.is_tracing = known


def _run(config: Any, rows: int, length: int, bf16: bool, checkpointing: bool, trust_remote_code: bool) -> Architecture:
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights
    from transformers.pytorch_utils import Conv1D

    seen: dict[int, torch.Tensor] = {}
    with FakeTensorMode(), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
        model.tie_weights()
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        parameters = list(model.parameters())
        own = {parameter.untyped_storage()._cdata for parameter in parameters}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            place = tensor.untyped_storage()._cdata
            if place not in own:
                # Held, so that its place is nobody else's.
                seen[place] = tensor
            return tensor

        head = model.get_output_embeddings()
        linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear | Conv1D) and module is not head]
        decoder = model.get_decoder() or model
        with (
            recomputing(linear),
            _as_if_run(),
            saved_tensors_hooks(keep, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16, bf16),
        ):
            decoder(input_ids=torch.zeros(rows, length, dtype=torch.long), use_cache=False)
    return Architecture(
        sum(tensor.untyped_storage().nbytes() for tensor in seen.values()),
        sum(parameter.numel() for parameter in parameters),
        sum(parameter.numel() for parameter in parameters if parameter.ndim == 1),
        vocabulary_of(model),
        max((max(module.weight.shape) for module in linear), default=0),
    )
