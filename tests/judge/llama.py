"""A llama in float64 numpy, from its definition, for the checkpoints of tests/tiny.py."""

from __future__ import annotations

from typing import Any

import numpy as np


def log_probabilities(z: np.ndarray) -> np.ndarray:
    """Logits [..., n] to natural log-probabilities."""
    z = z.astype(np.float64)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def llama(config: dict[str, Any], tensors: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """Logits [tokens, vocabulary] of token ids [tokens]; embeddings are tied."""
    w = {name.removesuffix(".weight"): t.astype(np.float64) for name, t in tensors.items()}
    heads, groups, width = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    n = len(ids)
    # Pair (j, j + width/2) of a head turns by position / theta^(2j/width): a product with a complex number.
    turn = np.exp(1j * np.arange(n)[:, None] / config["rope_theta"] ** (2 * np.arange(width // 2) / width))

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return w[name] * x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"])

    def rotate(head: np.ndarray) -> np.ndarray:
        z = (head[:, : width // 2] + 1j * head[:, width // 2 :]) * turn
        return np.concatenate([z.real, z.imag], -1)

    def attention(x: np.ndarray, stem: str) -> np.ndarray:
        q, k, v = ((x @ w[f"{stem}.{p}_proj"].T).reshape(n, -1, width) for p in "qkv")
        out = []
        for h in range(heads):
            g = h * groups // heads
            scores = rotate(q[:, h]) @ rotate(k[:, g]).T / width**0.5
            scores[np.triu_indices(n, 1)] = -np.inf
            out.append(np.exp(log_probabilities(scores)) @ v[:, g])
        return np.concatenate(out, -1) @ w[f"{stem}.o_proj"].T

    def mlp(x: np.ndarray, stem: str) -> np.ndarray:
        gate = x @ w[f"{stem}.gate_proj"].T
        return (gate / (1 + np.exp(-gate)) * (x @ w[f"{stem}.up_proj"].T)) @ w[f"{stem}.down_proj"].T

    x = w["model.embed_tokens"][ids]
    for i in range(config["num_hidden_layers"]):
        stem = f"model.layers.{i}"
        x = x + attention(norm(x, f"{stem}.input_layernorm"), f"{stem}.self_attn")
        x = x + mlp(norm(x, f"{stem}.post_attention_layernorm"), f"{stem}.mlp")
    return norm(x, "model.norm") @ w["model.embed_tokens"].T
