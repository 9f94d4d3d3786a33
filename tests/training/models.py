"""A tiny causal model, its rows and a student of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from llmcomp.training.settings import Settings
from llmcomp.training.teacher import TeacherCache, write_cache

VOCABULARY, LENGTH = 96, 16


def llama(seed: int = 0, **more: Any) -> LlamaForCausalLM:
    """Random, with logits of a spread that language has: those of freshly made weights are all alike."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=64, **{**sizes, "tie_word_embeddings": False, **more}))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    return model.eval()


def student(noise: float = 0.02, trainable: str = "", **more: Any) -> LlamaForCausalLM:
    """The same with disturbed weights; `trainable` is a part of the names of those that are trained."""
    model = llama(**more)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(noise * torch.randn_like(p))
            p.requires_grad_(trainable in name)
    return model


def rows(count: int, seed: int = 0, length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, (count, length))


def pairs(count: int, seed: int = 0) -> list[tuple[np.ndarray, int]]:
    """(Tokens of prompt and completion, where it begins), of 2 to 20 tokens: some are longer than a row; some prompts are empty."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        begins, told = int(rng.integers(0, 8)), int(rng.integers(2, 14))
        found.append((rng.integers(0, VOCABULARY, begins + told), begins))
    return found


def cached(folder: Path, *parts: np.ndarray, k: int = 16) -> TeacherCache:
    return write_cache(folder, llama(), np.concatenate(parts), "the tiny teacher", k)


def settings(**more: Any) -> Settings:
    values: dict[str, Any] = {"learning_rates": {"all": 3e-3}, "batch_rows": 4, "microbatch_rows": 2, "eval_every": 5, "warmup_share": 0.1}
    return Settings.of({**values, **more})


def one_group(name: str) -> str:
    return "all"
