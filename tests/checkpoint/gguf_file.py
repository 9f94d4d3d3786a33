"""A tiny llama as a .gguf file, written by gguf-py, with the rows of q and k interleaved as llama.cpp does."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from llmcomp.checkpoint.gguf_names import BLOCK, TENSORS
from tests.tiny import tiny_config, tiny_tensors

NAMES = {v: k for k, v in TENSORS.items()}
STEMS = {v: k for k, v in BLOCK.items()}
TOKENS = ["<|end|>", "<|user|>"]
MERGES = [("t", "h"), ("th", "e"), ("a", "n"), ("i", "n"), ("e", "r"), ("\u0120", "the"), ("1", "2")]


def vocabulary() -> tuple[list[str], list[int]]:
    from tests.reference.bpe import byte_alphabet

    tokens = [*TOKENS, *byte_alphabet().values(), *(a + b for a, b in MERGES)]
    return tokens, [3] * len(TOKENS) + [1] * (len(tokens) - len(TOKENS))


def interleave(w: np.ndarray, head: int) -> np.ndarray:
    """Row j * d/2 + i of a head goes to 2i + j."""
    heads = w.reshape(-1, 2, head // 2, *w.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(w.shape)


def write_gguf(
    path: Path, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32, pre: str = "smollm", **values: Any
) -> dict[str, np.ndarray]:
    """Write the file; returns its tensors in float32 under Hugging Face names, as decoding must give them back."""
    config = tiny_config(torch_dtype="float32", hidden_size=96, intermediate_size=160)
    tensors = {n: t.astype(np.float32) for n, t in tiny_tensors(config).items()}
    if values.pop("biases", False):
        rng = np.random.default_rng(1)
        for name in [n for n in tensors if n.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
            tensors[name.replace(".weight", ".bias")] = rng.normal(size=tensors[name].shape[0]).astype(np.float32)
    architecture = values.pop("architecture", "llama")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(256)
    writer.add_block_count(2)
    writer.add_embedding_length(96)
    writer.add_feed_forward_length(160)
    writer.add_head_count(6)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(16)
    tokens, kinds = vocabulary()
    writer.add_tokenizer_model(values.pop("tokenizer", "gpt2"))
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{a} {b}" for a, b in MERGES])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for key, value in values.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    decoded = {}
    for name, w in tensors.items():
        stem, _, end = name.rpartition(".")
        number = name.split(".")[2] if ".layers." in name else ""
        short = NAMES.get(name) or f"blk.{number}.{STEMS[stem.split('.', 3)[3]]}.{end}"
        permuted = architecture == "llama" and stem.endswith(("q_proj", "k_proj"))
        stored = interleave(w, 16) if permuted else w
        if w.ndim == 1 or w.shape[1] % gguf.GGML_QUANT_SIZES[kind][0]:
            writer.add_tensor(short, stored)
            decoded[name] = w
            continue
        data = gguf.quants.quantize(stored, kind)
        writer.add_tensor(short, data, raw_dtype=kind)
        back = gguf.quants.dequantize(data, kind).astype(np.float32)
        decoded[name] = uninterleave(back, 16) if permuted else back
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return decoded


def uninterleave(w: np.ndarray, head: int) -> np.ndarray:
    heads = w.reshape(-1, head // 2, 2, *w.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(w.shape)


def raw_gguf(path: Path, tensors: list[tuple[str, list[int], int, int]], values: dict[str, int] | None = None, data: int = 256) -> None:
    """A header that may say anything: (name, dims, kind, offset) of each tensor, uint32 values, and `data` bytes of zeros behind it."""

    def text(s: str) -> bytes:
        return struct.pack("<Q", len(s.encode())) + s.encode()

    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values or {}))
    for key, value in (values or {}).items():
        out += text(key) + struct.pack("<II", 4, value)
    for name, dims, kind, offset in tensors:
        out += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    path.write_bytes(out + bytes(-len(out) % 32 + data))
