"""A two-layer llama checkpoint with a tokenizer, written without torch or transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

DTYPES: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """Hidden 96, inner 160, 6 heads of 16 with 2 for keys and values, tied; bfloat16."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 320,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        **overrides,
    }


def tiny_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Seeded random weights under Hugging Face names."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES[config["torch_dtype"]]
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        stem = f"model.layers.{i}."
        shapes |= {
            stem + "input_layernorm.weight": (hidden,),
            stem + "self_attn.q_proj.weight": (queries, hidden),
            stem + "self_attn.k_proj.weight": (keys, hidden),
            stem + "self_attn.v_proj.weight": (keys, hidden),
            stem + "self_attn.o_proj.weight": (hidden, queries),
            stem + "post_attention_layernorm.weight": (hidden,),
            stem + "mlp.gate_proj.weight": (inner, hidden),
            stem + "mlp.up_proj.weight": (inner, hidden),
            stem + "mlp.down_proj.weight": (hidden, inner),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return {
        n: ((1 + 0.1 * rng.normal(size=s)) if len(s) == 1 else rng.normal(size=s) / np.sqrt(s[1])).astype(dtype) for n, s in shapes.items()
    }


def tiny_llama(folder: Path, shards: int = 1, seed: int = 0, tokenizer: bool = True, **overrides: Any) -> dict[str, np.ndarray]:
    """Write the checkpoint into `folder`; returns its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(**overrides)
    tensors = tiny_tensors(config, seed)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}))
    save_shards(folder, tensors, shards)
    if tokenizer:
        tiny_tokenizer(folder, config["vocab_size"])
    return tensors


def save_shards(folder: Path, tensors: dict[str, np.ndarray], shards: int = 1) -> None:
    """One file, or several with an index."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    names = list(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        save_file({n: tensors[n] for n in part}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.nbytes for t in tensors.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))


def tiny_tokenizer(folder: Path, vocabulary: int = 320) -> None:
    """Byte-level BPE with a few merges and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("a", "n"), ("i", "n"), ("e", "r"), ("o", "n")]
    tokens = [*SPECIAL, *alphabet, *(a + b for a, b in merges)]
    assert len(tokens) <= vocabulary
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[0],
        "pad_token": SPECIAL[0],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 256,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
