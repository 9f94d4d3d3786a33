"""Adapters as PEFT stores them, relative to the float weights that training began with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from llmcomp.errors import OptionError
from llmcomp.training.quantized import FakeQuantizedWeight, adapted

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."


def save_adapters(model: Any, folder: Path, base: str) -> None:
    """Write the adapters of `model` into `folder`, the ranks of them that are in use; `base` is the model that they belong to.

    Raises:
        OptionError: it has none.
    """
    from peft import LoraConfig

    found = _used(model)
    if not found:
        raise OptionError("adapters", "the model has none", "Train with a rank above 0")
    ranks = {name: one.active for name, _, one in found}
    most = max(ranks.values())
    config = LoraConfig(
        r=most,
        # PEFT multiplies by alpha / r.
        lora_alpha=most,
        rank_pattern={name: rank for name, rank in ranks.items() if rank != most},
        alpha_pattern={name: rank for name, rank in ranks.items() if rank != most},
        target_modules=sorted(ranks),
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    tensors = {key: (value.T if turned else value).detach().contiguous() for key, (value, turned) in _named(found).items()}
    save_file(tensors, folder / TENSORS, {"format": "pt"})


def load_adapters(model: Any, folder: Path) -> None:
    """Put what `save_adapters` has written into the adapters of `model`.

    Raises:
        OptionError: they belong to another model: names, ranks or shapes differ.
    """
    held = load_file(folder / TENSORS)
    scale = _scale(json.loads((folder / CONFIG).read_text(encoding="utf8")), folder)
    wanted = {key: value.T if turned else value for key, (value, turned) in _named(_used(model)).items()}
    for name in sorted({*held, *wanted}):
        if name not in held or name not in wanted or held[name].shape != wanted[name].shape:
            there = list(held[name].shape) if name in held else "nothing"
            needed = list(wanted[name].shape) if name in wanted else "nothing"
            raise OptionError(
                f"adapter {folder}: {name}", f"it holds {there}, the model wants {needed}: it is for another model", "Give its own"
            )
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(held[name] * (scale if name.endswith(("lora_B.weight", "lora_embedding_B")) else 1.0))


def _used(model: Any) -> list[tuple[str, torch.nn.Module, FakeQuantizedWeight]]:
    return [(name, module, one) for name, module, one in adapted(model) if one.active]


def _named(found: Sequence[tuple[str, torch.nn.Module, FakeQuantizedWeight]]) -> dict[str, tuple[torch.Tensor, bool]]:
    """PEFT's name of a tensor -> (it, whether PEFT has it turned around). What it adds to an embedding is (B A) transposed."""
    tensors: dict[str, tuple[torch.Tensor, bool]] = {}
    for name, module, one in found:
        assert one.lora_A is not None and one.lora_B is not None
        a, b = one.lora_A[: one.active], one.lora_B[:, : one.active]
        if isinstance(module, torch.nn.Embedding):
            tensors |= {f"{PREFIX}{name}.lora_embedding_A": (b, True), f"{PREFIX}{name}.lora_embedding_B": (a, True)}
        else:
            tensors |= {f"{PREFIX}{name}.lora_A.weight": (a, False), f"{PREFIX}{name}.lora_B.weight": (b, False)}
    return tensors


def _scale(config: dict[str, Any], folder: Path) -> float:
    """What B is multiplied by."""
    if (
        config.get("peft_type") != "LORA"
        or config.get("use_dora")
        or config.get("use_rslora")
        or config.get("alpha_pattern") not in (None, {}, config.get("rank_pattern"))
    ):
        raise OptionError(f"adapter {folder}", "it is no plain LoRA", "Give one that was saved by llmcomp, or a plain LoRA of PEFT")
    return float(config["lora_alpha"]) / float(config["r"])
