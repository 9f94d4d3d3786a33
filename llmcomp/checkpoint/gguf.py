"""A .gguf file as a checkpoint: tensors under their Hugging Face names, decoded row by row, and a config made from its metadata."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from llmcomp.checkpoint.checkpoint import Checkpoint, TensorInfo
from llmcomp.checkpoint.gguf_header import GGUFTensor, read_gguf
from llmcomp.checkpoint.gguf_names import ARCHITECTURES, BLOCK, CONFIG, TENSORS
from llmcomp.checkpoint.gguf_tokenizer import check_gguf_tokenizer, save_gguf_tokenizer
from llmcomp.errors import CheckpointError

BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
PLAIN = {0: ("F32", np.dtype(np.float32)), 1: ("F16", np.dtype(np.float16)), 30: ("BF16", np.dtype(ml_dtypes.bfloat16))}
"""GGML types that are not quantized; everything else is decoded to float32."""


class GGUFCheckpoint(Checkpoint):
    """`rows` decodes; nothing is kept."""

    def __init__(self, path: Path, source: str) -> None:
        self.path, self.source, self.folder = path, source, None
        self.open_arguments = {"source": str(path)}
        self.side_files = []
        self.metadata, stored = read_gguf(path)
        self._stored: dict[str, GGUFTensor] = {}
        tensors: dict[str, TensorInfo] = {}
        name = str(self.metadata.get("general.architecture"))
        if name not in ARCHITECTURES:
            raise CheckpointError(
                source,
                f"GGUF architecture {name!r} is not read, only {', '.join(ARCHITECTURES)}",
                "Export the safetensors checkpoint of this model instead",
            )
        self._architecture, self._name = ARCHITECTURES[name], name
        for tensor in stored.values():
            known = _hf_name(tensor.name)
            if known is None:
                raise CheckpointError(
                    source,
                    f"tensor {tensor.name} is not one of a plain {name} model",
                    "Export the safetensors checkpoint of this model instead",
                )
            self._stored[known] = tensor
            dtype = PLAIN[tensor.kind][0] if tensor.kind in PLAIN else "F32"
            tensors[known] = TensorInfo(known, dtype, tensor.shape, path, tensor.begin, tensor.end)
        self.tensors = tensors
        self.config = self._config()
        self.generation_config = {
            "bos_token_id": self.config["bos_token_id"],
            "eos_token_id": self.config["eos_token_id"],
            "pad_token_id": self.config["pad_token_id"],
        }
        self._map = np.memmap(path, np.uint8, "r")

    def rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self._stored[name]
        count = tensor.shape[0]
        raw = np.asarray(self._map[tensor.begin : tensor.end])
        if tensor.kind in PLAIN:
            whole = np.frombuffer(raw, PLAIN[tensor.kind][1]).reshape(tensor.shape)
            return whole[self._order(name, start, stop)]
        picked = raw.reshape(count, -1)[self._order(name, start, stop)]
        return np.ascontiguousarray(dequantize(picked, GGMLQuantizationType(tensor.kind)), np.float32)

    def _order(self, name: str, start: int, stop: int) -> Any:
        """Which stored rows are rows [start, stop): in a head of d, stored row 2i+j is row j·d/2+i where llama.cpp has interleaved them."""
        stem = name.rsplit(".", 2)[-2] if name.count(".") > 1 else ""
        if not self._architecture.permuted or stem not in ("q_proj", "k_proj"):
            return slice(start, stop)
        head = int(self.config["head_dim"])
        row = np.arange(start, min(stop, self._stored[name].shape[0]))
        inner = row % head
        return row - inner + inner % (head // 2) * 2 + inner // (head // 2)

    def _config(self) -> dict[str, Any]:
        get = self.metadata.get
        arch = self._architecture
        config: dict[str, Any] = {"architectures": [arch.architecture], "model_type": arch.model_type, "torch_dtype": "float32"}
        for key, field in CONFIG.items():
            value = get(f"{self._name}.{key}")
            if value is None and key == "attention.head_count_kv":
                value = get(f"{self._name}.attention.head_count")
            if value is None and key == "rope.freq_base":
                value = 10000.0
            if type(value) not in (int, float):
                raise CheckpointError(self.source, f"its metadata lacks {self._name}.{key}", "Export the safetensors checkpoint instead")
            config[field] = value
        # Stored as float32: 1e-05 comes back as 9.999999747378752e-06.
        config["rms_norm_eps"] = float(f"{config['rms_norm_eps']:.7g}")
        scaling = get(f"{self._name}.rope.scaling.type")
        if scaling not in (None, "none"):
            raise CheckpointError(
                self.source, f"its rotary embedding is scaled ({scaling})", "Export the safetensors checkpoint of this model instead"
            )
        embedding = self.tensors.get("model.embed_tokens.weight")
        if embedding is None:
            raise CheckpointError(self.source, "it has no token_embd.weight", "Download or copy the file again")
        config["vocab_size"] = embedding.shape[0]
        config["head_dim"] = get(f"{self._name}.{arch.head_dim}") or config["hidden_size"] // config["num_attention_heads"]
        config["tie_word_embeddings"] = "lm_head.weight" not in self.tensors
        config["hidden_act"] = "silu"
        config["attention_bias"] = any(n.endswith("q_proj.bias") for n in self.tensors)
        config["bos_token_id"] = get("tokenizer.ggml.bos_token_id")
        config["eos_token_id"] = get("tokenizer.ggml.eos_token_id")
        config["pad_token_id"] = get("tokenizer.ggml.padding_token_id", config["eos_token_id"])
        return config

    def check_tokenizer(self) -> None:
        check_gguf_tokenizer(self.metadata, self.source)

    def save_tokenizer(self, folder: Path) -> None:
        save_gguf_tokenizer(self.metadata, self.source, folder)

    def fingerprint(self) -> str:
        stat = self.path.stat()
        headers = [(t.name, t.kind, t.shape, t.begin) for t in self._stored.values()]
        return hashlib.sha256(json.dumps([stat.st_size, stat.st_mtime_ns, headers, self.config], sort_keys=True).encode()).hexdigest()


def _hf_name(name: str) -> str | None:
    if name in TENSORS:
        return TENSORS[name]
    match = BLOCK_NAME.fullmatch(name)
    if match is None or match.group(2) not in BLOCK:
        return None
    return f"model.layers.{match.group(1)}.{BLOCK[match.group(2)]}.{match.group(3)}"
