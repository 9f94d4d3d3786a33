"""What distillation holds, counted by hand; and what autograd keeps, against a pass with data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from llmcomp.options import ExportOptions
from llmcomp.preparing import open_checkpoint
from llmcomp.training.activations import look
from llmcomp.training.forecast import BASE_BYTES, Model, Trained, Work, memory_parts, trainable
from llmcomp.training.loading import load_model
from llmcomp.training.quantized import recomputing
from tests.tiny import tiny_llama

MODEL = Model(10_000, 50, [Trained(8, 16, 2, True), Trained(32, 8, 1, False)], 32)
WORK = Work(4, False, True, True, 10, 1, 5_000, 300)


def test_every_part_is_counted_from_the_shapes() -> None:
    # Adapters 4 (8 + 16) + 4 (32 + 8), gains 16 + 32, norms 50.
    assert trainable(MODEL, WORK) == 256 + 48 + 50
    assert memory_parts(MODEL, WORK) == {
        "runtime": BASE_BYTES,
        "weights": 40_000,
        "adapters": 4 * 256,
        # First scales and gains, of one weight zero points too.
        "scales and zero points": 4 * (3 * 16 + 2 * 32),
        "AdamW's moments": 8 * 354,
        "gradients": 0,
        "activations": 5_000,
        "a layer, or logits, at a time": 4 * 4 * 256 + 3 * 4 * 10 * 32,
    }


def test_what_is_trained_decides() -> None:
    whole = replace(WORK, rank=0, weights=True)
    assert trainable(MODEL, whole) == 128 + 256 + 48 + 50
    assert trainable(MODEL, replace(WORK, rank=0)) == 48 + 50
    assert trainable(MODEL, replace(WORK, rank=0, norms=False)) == 48
    assert trainable(MODEL, replace(WORK, scales=False)) == 256 + 50
    assert memory_parts(MODEL, whole)["adapters"] == 0
    # More gradients than activations: at the end of the backward pass these are what is there.
    fewer = memory_parts(MODEL, replace(whole, activation_bytes=1_900))
    assert (fewer["gradients"], fewer["activations"]) == (4 * 482, 0)
    both = memory_parts(MODEL, replace(WORK, accumulated=2))
    assert (both["gradients"], both["activations"]) == (4 * 354, 5_000)
    assert memory_parts(MODEL, replace(WORK, logits_bytes=1 << 20))["a layer, or logits, at a time"] == 4 << 20


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_without_data_keeps_what_one_with_data_does(tmp_path: Path, checkpointing: bool) -> None:
    tiny_llama(tmp_path / "m")
    checkpoint = open_checkpoint(ExportOptions(model=str(tmp_path / "m"), output=tmp_path / "o"))
    found = look(checkpoint, 2, 64, False, checkpointing)
    # Two blocks of (2 x 96 x 96 + 2 x 32 x 96 + 3 x 96 x 160), a tied table, five norms.
    assert found.vectors == 5 * 96 and found.parameters == 320 * 96 + 2 * (2 * 96 * 96 + 2 * 32 * 96 + 3 * 96 * 160) + 5 * 96
    assert (found.vocabulary, found.widest) == (320, 160)
    model = load_model(checkpoint).train()
    own = {parameter.data_ptr() for parameter in model.parameters()}
    seen: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            seen[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    linear = [module for module in model.model.modules() if isinstance(module, torch.nn.Linear)]
    with recomputing(linear), saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(input_ids=torch.zeros(2, 64, dtype=torch.long), use_cache=False)
    kept = sum(tensor.untyped_storage().nbytes() for tensor in seen.values())
    # Checkpointed blocks leave their inputs and what one of two blocks keeps at a time: less than all, more than half.
    assert (found.kept_bytes == kept) if not checkpointing else (kept / 2 < found.kept_bytes < kept)
