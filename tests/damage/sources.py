"""Undamaged sources, as small as a trace allows: a block, 16 hidden values, 64 tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from tests.checkpoint.encodings import test_gptq
from tests.checkpoint.encodings.store import save
from tests.checkpoint.gguf_file import write_gguf
from tests.tiny import save_shards, tiny_llama

SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}
OWN = "import pathlib\npathlib.Path(__file__).with_name('RAN').touch()\nraise RuntimeError\n"
ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}


def write_all(root: Path) -> None:
    """A folder, or a file in one, of each kind."""
    llama(root / "llama")
    llama(root / "plain", rope_scaling=None)
    llama(root / "sharded", shards=3, rope_scaling=None)
    tiny_llama(root / "tokenized", **{**SMALL, "vocab_size": 320})
    qwen3(root / "qwen3")
    mixture(root / "mixture")
    gpt2(root / "gpt2")
    gptq(root / "gptq")
    (root / "gguf").mkdir()
    write_gguf(root / "gguf" / "m.gguf")
    for folder in root.iterdir():
        # What a config may want to be imported: it must never be.
        (folder / "own.py").write_text(OWN)


def llama(folder: Path, shards: int = 1, **changes: Any) -> None:
    tiny_llama(folder, shards, tokenizer=False, **{"rope_scaling": ROPE, **SMALL, **changes})


def qwen3(folder: Path) -> None:
    """Norms of queries and keys, and a type for each layer."""
    changes = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}
    told = {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 2, "attention_bias": False}
    tensors = tiny_llama(folder, tokenizer=False, **{**SMALL, **changes, **told, "tie_word_embeddings": False})
    norms = np.linspace(0.5, 1.5, 8, dtype=np.float32).astype(tensors["model.norm.weight"].dtype)
    for i in range(2):
        tensors |= {f"model.layers.{i}.self_attn.{n}_norm.weight": norms for n in "qk"}
    save_shards(folder, tensors)


def mixture(folder: Path) -> None:
    """Two experts, stored one by one."""
    told = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": []}
    changes = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True}
    tensors = tiny_llama(folder, tokenizer=False, **SMALL, **told, **changes)
    kind = tensors["model.norm.weight"].dtype
    stem = "model.layers.0."
    experts = {n: tensors.pop(n) for n in list(tensors) if ".mlp." in n}
    for i in range(2):
        tensors |= {n.replace("mlp.", f"mlp.experts.{i}."): w * (i + 1) for n, w in experts.items()}
    tensors |= {f"{stem}self_attn.{n}_norm.weight": np.linspace(0.5, 1.5, 8).astype(kind) for n in "qk"}
    tensors[f"{stem}mlp.gate.weight"] = np.linspace(-1, 1, 32).reshape(2, 16).astype(kind)
    save_shards(folder, tensors)


def gpt2(folder: Path) -> None:
    """Matrices stored turned around, a table of positions."""
    config = {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32,
        "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "bos_token_id": 0, "eos_token_id": 0, "torch_dtype": "float32",
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (64, 16), "wpe.weight": (32, 16), "ln_f.weight": (16,), "ln_f.bias": (16,)}
    for name, shape in {"attn.c_attn": (16, 48), "attn.c_proj": (16, 16), "mlp.c_fc": (16, 64), "mlp.c_proj": (64, 16)}.items():
        shapes |= {f"h.0.{name}.weight": shape, f"h.0.{name}.bias": shape[1:]}
    shapes |= {f"h.0.{name}.{part}": (16,) for name in ("ln_1", "ln_2") for part in ("weight", "bias")}
    rng = np.random.default_rng(0)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_shards(folder, {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()})


def gptq(folder: Path) -> None:
    """Matrices of the block in 4 bits, by 32 rows: the inner size of a llama's that is wide enough."""
    sizes = {**SMALL, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16, "num_key_value_heads": 2}
    tensors = tiny_llama(folder, tokenizer=False, quantization_config=test_gptq.settings(), **sizes)
    kept: dict[str, np.ndarray] = {}
    for name, weight in tensors.items():
        if "_proj" in name:
            parts, _ = test_gptq.made(4, weight.shape[1], weight.shape[0], 32)
            kept |= {re.sub(f"^{re.escape(test_gptq.X)}", name.removesuffix(".weight"), part): stored for part, stored in parts.items()}
        else:
            kept[name] = weight
    save(folder / "model.safetensors", kept)
