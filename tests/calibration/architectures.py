"""Tiny random models of the architectures that calibration must divide into blocks, made by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SIZES = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
LLAMA = {**SIZES, "intermediate_size": 128, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
WINDOWS = {**LLAMA, "head_dim": 16, "sliding_window": 16}
GEMMA4 = {"global_head_dim": 16, "num_global_key_value_heads": 2, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**LLAMA, "head_dim": 16}),
    "qwen3": ("Qwen3Config", {**LLAMA, "head_dim": 16}),
    "phi3": ("Phi3Config", LLAMA),
    # Norms stored as w - 1, an embedding that scales; then sandwich norms and windows, the norms of q and k too; then one of v.
    "gemma": ("GemmaConfig", {**LLAMA, "head_dim": 16}),
    "gemma3_text": ("Gemma3TextConfig", {**WINDOWS, "query_pre_attn_scalar": 16}),
    "gemma4_text": ("Gemma4TextConfig", {**WINDOWS, **GEMMA4, "layer_types": ["sliding_attention", "full_attention"]}),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0},
    ),
    "opt": ("OPTConfig", {**SIZES, "ffn_dim": 128, "word_embed_proj_dim": 64, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}),
    "qwen3_moe": ("Qwen3MoeConfig", {**LLAMA, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}),
}
MIXTURE = {**LLAMA, "head_dim": 16, "num_experts_per_tok": 2}
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    # Stored one by one; then under other names; then fused, inputs first, with biases; then beside experts that all tokens see.
    "qwen3_moe": ("Qwen3MoeConfig", {**MIXTURE, "num_experts": 4, "moe_intermediate_size": 64}),
    "mixtral": ("MixtralConfig", {**MIXTURE, "num_local_experts": 4}),
    "gpt_oss": ("GptOssConfig", {**MIXTURE, "num_local_experts": 4}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**MIXTURE, "num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96, "decoder_sparse_step": 1},
    ),
    "phimoe": ("PhimoeConfig", {**MIXTURE, "num_local_experts": 4}),
}


def save(name: str, folder: Path) -> Any:
    """Write the checkpoint in float32 and return the model."""
    import torch
    import transformers

    kind, settings = {**EXPERTS, **CONFIGS}[name]
    config = getattr(transformers, kind)(**settings)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # Norms and biases off their starting values: the exporter drops a product with ones and a sum with zeros.
            if parameter.ndim == 1 or key.endswith("_bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif "expert" not in key:
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return model
