"""A Hugging Face model in memory, its parameters filled from our own checkpoint reader: encodings decoded, adapters merged, .gguf names mapped."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llmcomp.checkpoint import Checkpoint
from llmcomp.errors import ArchitectureError
from llmcomp.graph.conversions import pieces_of, stored_parameters
from llmcomp.graph.match import missing_tensors_error

TILE = 1 << 22
"""Values that are turned into f32 at a time."""


def load_model(checkpoint: Checkpoint, trust_remote_code: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    """The causal language model of `checkpoint`, in evaluation mode.

    Raises:
        ArchitectureError: a parameter that the checkpoint does not hold, or holds in another shape.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with tempfile.TemporaryDirectory() as scratch:
        folder = checkpoint.folder
        if folder is None or not checkpoint.plain:
            folder = Path(scratch)
            (folder / "config.json").write_text(json.dumps(checkpoint.config), encoding="utf8")
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    model.tie_weights()
    prefix = getattr(model, "base_model_prefix", "")
    stored = stored_parameters(model, checkpoint, prefix)
    missing, seen = [], set()
    with torch.no_grad():
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if id(parameter) in seen:
                continue
            pieces = pieces_of(name, checkpoint, stored, prefix)
            if pieces is None:
                missing.append((name, parameter))
                continue
            seen.add(id(parameter))
            value = pieces.values(checkpoint)
            if value.shape != parameter.shape:
                raise ArchitectureError(
                    f"{checkpoint.source}: tensor {pieces.tensors[0]}",
                    f"its shape is {list(value.shape)}, the architecture wants {list(parameter.shape)}",
                    "Check config.json",
                )
            rows = np.atleast_1d(value)
            step = max(1, TILE * len(rows) // max(1, rows.size))
            for start in range(0, len(rows), step):
                # The mapped values of a large table would be there twice as f32.
                part = torch.from_numpy(np.asarray(rows[start : start + step], np.float32))
                parameter.reshape(rows.shape)[start : start + step].copy_(part)
    absent = [name for name, parameter in missing if id(parameter) not in seen]
    if absent:
        raise missing_tensors_error(absent, set(checkpoint.tensors), checkpoint.source)
    return model.eval()
