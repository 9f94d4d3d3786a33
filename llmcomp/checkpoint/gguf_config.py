"""config.json and generation_config.json made from the metadata of a .gguf file, which is untrusted like all of its header."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from llmcomp.checkpoint.checkpoint import TensorInfo
from llmcomp.checkpoint.gguf_names import CONFIG, Architecture
from llmcomp.errors import CheckpointError

INSTEAD = "Export the safetensors checkpoint of this model instead"


def make_config(metadata: Mapping[str, Any], arch: Architecture, tensors: Mapping[str, TensorInfo], source: str) -> dict[str, Any]:
    """What the table of `gguf_names` says, with the defaults of llama.cpp where a key is optional.

    Raises:
        CheckpointError: a value is missing or impossible, or the model is not plain (scaled or partial rotation, layers that differ).
    """
    prefix = metadata["general.architecture"]

    def get(key: str) -> Any:
        return metadata.get(f"{prefix}.{key}")

    config: dict[str, Any] = {"architectures": [arch.architecture], "model_type": arch.model_type, "torch_dtype": "float32"}
    for key, (field, kind) in CONFIG.items():
        value = get(key)
        if value is None and key == "attention.head_count_kv":
            value = get("attention.head_count")
        if value is None and key == "rope.freq_base":
            value = 10000.0
        if value is None:
            raise CheckpointError(source, f"its metadata lacks {prefix}.{key}", INSTEAD)
        config[field] = _positive(value, kind, f"{prefix}.{key}", source)
    # Stored as float32: 1e-05 comes back as 9.999999747378752e-06.
    config["rms_norm_eps"] = float(f"{config['rms_norm_eps']:.7g}")
    scaling = get("rope.scaling.type")
    if scaling not in (None, "none"):
        raise CheckpointError(source, f"its rotary embedding is scaled ({str(scaling)[:80]})", INSTEAD)
    config["head_dim"] = _head(get, config, source)
    embedding = tensors.get("model.embed_tokens.weight")
    if embedding is None:
        raise CheckpointError(source, "it has no token_embd.weight", "Download or copy the file again")
    config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    config["hidden_act"] = "silu"
    config["attention_bias"] = any(n.endswith("q_proj.bias") for n in tensors)
    _check_blocks(tensors, config["num_hidden_layers"], source)
    # None is said aloud: an absent key would mean the architecture's own default.
    return config | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")) | make_generation_config(metadata)


def make_generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Token ids that begin, end and pad; the end of a turn ends too where the file tells it apart; padding is the end where there is none."""
    ids = {key: metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "eot", "padding")}
    found = {key: value for key, value in ids.items() if type(value) is int}
    ends = list(dict.fromkeys(found[key] for key in ("eos", "eot") if key in found))
    config: dict[str, Any] = {}
    if "bos" in found:
        config["bos_token_id"] = found["bos"]
    if ends:
        config["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    if "padding" in found or ends:
        config["pad_token_id"] = found.get("padding", ends[0] if ends else None)
    return config


def _check_blocks(tensors: Mapping[str, TensorInfo], count: int, source: str) -> None:
    held = {int(name.split(".")[2]) for name in tensors if name.startswith("model.layers.")}
    if len(held) != count or max(held, default=-1) != count - 1:
        raise CheckpointError(source, f"its metadata tells of {count} blocks and it holds {len(held)}", "Download or copy the file again")


def _positive(value: Any, kind: type, what: str, source: str) -> Any:
    # Not isinstance: a bool is an int to Python.
    if type(value) is list and value and all(v == value[0] for v in value):
        value = value[0]
    if type(value) not in (int, float) or (kind is int and type(value) is not int) or not 0 < value < 1 << 40 or not math.isfinite(value):
        told = "differs from layer to layer" if type(value) is list else f"is {str(value)[:80]!r}"
        raise CheckpointError(source, f"{what} of its metadata {told}", INSTEAD)
    return kind(value)


def _head(get: Any, config: dict[str, Any], source: str) -> int:
    """The size of a head; queries and keys are rotated over all of it."""
    rotated, told = get("rope.dimension_count"), get("attention.key_length")
    head = told if told is not None else rotated
    if head is None:
        head = config["hidden_size"] // config["num_attention_heads"]
    head = int(_positive(head, int, "the size of a head", source))
    if head % 2 or (rotated is not None and rotated != head):
        raise CheckpointError(source, f"it rotates {rotated} of the {head} values of a head", INSTEAD)
    if get("attention.value_length") not in (None, head):
        raise CheckpointError(source, f"its values have heads of another size than its keys ({head})", INSTEAD)
    return head
