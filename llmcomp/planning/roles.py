"""Layers that need more care than their shape tells."""

from __future__ import annotations

import re

from llmcomp.graph.layer import Layer

_ROUTER = re.compile(
    r"(?:.*\.)?(?:(?:mlp|moe|block_sparse_moe|feed_forward|ffn|mixer)\.(?:gate|gate\.wg|shared_expert_gate)|router(?:\.\w+)?)"
)


def is_router(layer: Layer) -> bool:
    """Whether a layer chooses experts: it is tiny, and a token sent to the wrong one is lost.

    By name, as Hugging Face's mixtures of experts have it (`gate_proj` is none), and by having fewer outputs than inputs, which the wide
    gate of a plain MLP has not. NNCF spares routers in its tables for some models only.
    """
    return len(layer.shape) == 2 and layer.shape[0] < layer.shape[1] and _ROUTER.fullmatch(layer.name) is not None
