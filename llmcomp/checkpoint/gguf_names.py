"""What is known about GGUF architectures, as data: names of tensors and of config values."""

from __future__ import annotations

from dataclasses import dataclass

TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
"""Outside of the blocks: GGUF name -> Hugging Face name (gguf.tensor_mapping)."""

BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""`blk.N.KEY.weight|bias` -> `model.layers.N.VALUE.weight|bias`."""

CONFIG: dict[str, tuple[str, type]] = {
    "context_length": ("max_position_embeddings", int),
    "block_count": ("num_hidden_layers", int),
    "feed_forward_length": ("intermediate_size", int),
    "embedding_length": ("hidden_size", int),
    "attention.head_count": ("num_attention_heads", int),
    "attention.head_count_kv": ("num_key_value_heads", int),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", float),
    "rope.freq_base": ("rope_theta", float),
}
"""`ARCH.KEY` -> key of config.json, and its type."""


@dataclass(frozen=True)
class Architecture:
    model_type: str
    architecture: str
    permuted: bool
    """llama.cpp interleaves the rows of q and k for its rotary embedding."""


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", False),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", False),
}
