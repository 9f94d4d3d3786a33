"""The tracing child: what holds, what falls back, what is refused, and how fast."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmcomp import checkpoint as checkpoints
from llmcomp.errors import ArchitectureError
from llmcomp.graph.model import ModelGraph, unused_tensors
from llmcomp.graph.skeleton import get_skeletons
from tests.tiny import save_shards, tiny_llama


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMCOMP_CACHE", str(tmp_path / "cache"))


def refused_in_time(folder: Path, words: str) -> str:
    started = time.monotonic()
    with pytest.raises(ArchitectureError, match=words) as caught:
        get_skeletons(checkpoints.open(folder))[0]
    assert time.monotonic() - started < 30
    return str(caught.value)


def test_a_tensor_under_another_name(tmp_path: Path) -> None:
    tensors = tiny_llama(tmp_path / "m")
    renamed = {n.replace("layers.1.self_attn.q_proj", "layers.1.attention.q_proj"): t for n, t in tensors.items()}
    save_shards(tmp_path / "m", renamed)
    told = refused_in_time(tmp_path / "m", "1 tensor that the architecture needs is not in it")
    assert "model.layers.1.self_attn.q_proj.weight (stored as model.layers.1.attention.q_proj.weight?)" in told


def test_an_architecture_that_nobody_knows(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "m", model_type="frobnicate")
    refused_in_time(tmp_path / "m", "frobnicate")


def test_an_architecture_that_the_exporter_does_not_know(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "m", model_type="doge", architectures=["DogeForCausalLM"])
    refused_in_time(tmp_path / "m", "doge")


def test_remote_code_is_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    tiny_llama(tmp_path / "m", model_type="own", auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"})
    (tmp_path / "m" / "own.py").write_text(f"open({str(marker)!r}, 'w')\nraise RuntimeError\n")
    refused_in_time(tmp_path / "m", "trust-remote-code")
    assert not marker.exists()


def test_a_head_of_its_own_stays_and_an_equal_one_is_tied(tmp_path: Path) -> None:
    """tie_word_embeddings with both tensors stored: the loader does not tie them, unless they are the same."""
    for name, same in (("same", True), ("other", False)):
        tensors = tiny_llama(tmp_path / name)
        table = tensors["model.embed_tokens.weight"]
        save_shards(tmp_path / name, {**tensors, "lm_head.weight": table if same else table[::-1].copy()})
        checkpoint = checkpoints.open(tmp_path / name)
        graph = ModelGraph(get_skeletons(checkpoint)[0], checkpoint)
        tables = [layer for layer in graph.layers if layer.shape[0] == 320]
        assert [t.ops for t in tables] == ([("Gather", "MatMul")] if same else [("Gather",), ("MatMul",)])
        assert unused_tensors([graph]) == []


def test_experts_are_read_from_where_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "moe"
    tiny_moe(folder)
    checkpoint = checkpoints.open(folder)
    skeleton = get_skeletons(checkpoint)[0]
    assert skeleton.fallback is None
    graph = ModelGraph(skeleton, checkpoint)
    weights = sum(layer.size for layer in graph.layers)
    total = sum(int(np.prod(t.shape)) for t in checkpoint.tensors.values() if len(t.shape) > 1)
    assert weights == total and unused_tensors([graph]) == []


def tiny_moe(folder: Path) -> None:
    """Qwen3-MoE, six experts stored one by one as transformers saves them."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 96,
        "moe_intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "num_experts": 6, "num_experts_per_tok": 2, "vocab_size": 320, "torch_dtype": "float32", "tie_word_embeddings": True,
        "decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": [],
    }  # fmt: skip
    tiny_llama(folder, hidden_size=64)
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (320, 64), "model.norm.weight": (64,)}
    for i in range(2):
        stem = f"model.layers.{i}."
        shapes |= {stem + f"self_attn.{n}_proj.weight": s for n, s in (("q", (64, 64)), ("k", (32, 64)), ("v", (32, 64)), ("o", (64, 64)))}
        shapes |= {stem + f"self_attn.{n}_norm.weight": (16,) for n in "qk"}
        shapes |= {stem + n + ".weight": (64,) for n in ("input_layernorm", "post_attention_layernorm")}
        shapes[stem + "mlp.gate.weight"] = (6, 64)
        for e in range(6):
            shapes |= {stem + f"mlp.experts.{e}.{n}_proj.weight": s for n, s in (("gate", (48, 64)), ("up", (48, 64)), ("down", (64, 48)))}
    tensors = {n: (rng.normal(size=s) * 0.2 + (len(s) == 1)).astype(np.float32) for n, s in shapes.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert load_file(folder / "model.safetensors").keys() == tensors.keys()


def test_a_tensor_of_another_shape(tmp_path: Path) -> None:
    tensors = tiny_llama(tmp_path / "m")
    name = "model.layers.0.mlp.up_proj.weight"
    save_shards(tmp_path / "m", {**tensors, name: tensors[name][:100].copy()})
    told = refused_in_time(tmp_path / "m", r"its shape is \[100, 96\], the architecture wants \[160, 96\]")
    assert name in told and "Traceback" not in told
