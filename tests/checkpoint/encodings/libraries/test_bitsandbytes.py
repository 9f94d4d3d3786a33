"""bitsandbytes, as transformers loads and saves a model with it, against what it dequantizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.encodings.libraries.checks import check_kept, check_values
from tests.checkpoint.encodings.test_keep import cache  # noqa: F401
from tests.tiny import tiny_llama

KINDS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4 of two scales": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "fp4 of two scales": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}
INT8 = 5 * 2.0**-24
"""Of a value: the library multiplies a code by the largest of its row and that by 1 / 127, three roundings; we by the rounded quotient, two."""


def saved(folder: Path, kind: str, tmp_path: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(values, codes) of the quantized weights that are in `folder`, by the library."""
    import torch
    from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    # Rows of 64 and 128, so that runs of 64 end with them.
    tiny_llama(tmp_path / "source", torch_dtype="float32", hidden_size=64, intermediate_size=128, num_attention_heads=4)
    told = BitsAndBytesConfig(**KINDS[kind])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "source", quantization_config=told, device_map="cpu", dtype=torch.float32)
    model.save_pretrained(folder)
    values, codes = {}, {}
    for name, module in model.named_modules():
        if type(module).__name__ in ("Linear4bit", "Linear8bitLt"):
            weight, shape = module.weight, (module.out_features, module.in_features)
            if kind == "int8":
                codes[name] = weight.data
                values[name] = int8_vectorwise_dequant(weight.data, weight.SCB)
            else:
                numbers = torch.stack([weight.data >> 4, weight.data & 15], -1).reshape(shape)
                # Codebooks are sorted: a code of theirs is the place of its value, and both zeros of fp4 are one.
                _, places = torch.unique(weight.quant_state.code, return_inverse=True)
                codes[name] = places.to(torch.uint8)[numbers.long()]
                values[name] = dequantize_4bit(weight.data, weight.quant_state).reshape(shape).float()
    return tuple({f"{name}.weight": one.numpy() for name, one in part.items()} for part in (values, codes))  # type: ignore[return-value]


@pytest.mark.parametrize("kind", KINDS)
def test_values(tmp_path: Path, kind: str) -> None:
    values, _ = saved(tmp_path / "m", kind, tmp_path)
    assert len(values) == 14
    check_values(tmp_path / "m", values, INT8 if kind == "int8" else 0.0)


@pytest.mark.parametrize("kind", ["nf4 of two scales", *(pytest.param(kind, marks=pytest.mark.longest) for kind in ("fp4", "int8"))])
def test_keep(tmp_path: Path, kind: str) -> None:
    values, codes = saved(tmp_path / "m", kind, tmp_path)
    check_kept(tmp_path / "m", values, codes, tmp_path, INT8 if kind == "int8" else 0.0)
