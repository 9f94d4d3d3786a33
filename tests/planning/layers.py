"""Made-up layers."""

from __future__ import annotations

from llmcomp.graph.layer import Layer


def layer(name: str, out: int = 64, width: int = 128, ops: tuple[str, ...] = ("MatMul",), last: bool = False, order: int = 0) -> Layer:
    block = int(name.split(".")[2]) if ".layers." in name else None
    return Layer(name, f"{name}.weight", (out, width), ops, (f"__module.{name}/MatMul",), "BF16", block, order, last, False)


def model(blocks: int = 2, width: int = 128, tied: bool = False) -> list[Layer]:
    """Embedding, three layers per block, head."""
    table = layer("model.embed_tokens", 1000, width, ("Gather", "MatMul") if tied else ("Gather",), last=tied)
    inner = [layer(f"model.layers.{i}.{n}", 64, width) for i in range(blocks) for n in ("q_proj", "o_proj", "up_proj")]
    return [table, *inner] if tied else [table, *inner, layer("lm_head", 1000, width, last=True)]
