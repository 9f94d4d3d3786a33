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

CONFIG = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
"""`ARCH.KEY` -> config.json."""


@dataclass(frozen=True)
class Architecture:
    model_type: str
    architecture: str
    head_dim: str
    """Metadata key of the size of a head."""
    permuted: bool
    """llama.cpp interleaves the rows of q and k for its rotary embedding."""


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", "rope.dimension_count", True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", "attention.key_length", False),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", "attention.key_length", False),
}
