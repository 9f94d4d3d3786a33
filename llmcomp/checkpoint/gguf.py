"""A .gguf file as a checkpoint: tensors under their Hugging Face names, decoded row by row, and a config made from its metadata."""

from __future__ import annotations

import hashlib
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from llmcomp.checkpoint.checkpoint import Checkpoint, TensorInfo
from llmcomp.checkpoint.encoded import Encoded
from llmcomp.checkpoint.gguf_codes import GGUFCodes
from llmcomp.checkpoint.gguf_config import INSTEAD, make_config, make_generation_config
from llmcomp.checkpoint.gguf_header import GGUFTensor, read_gguf
from llmcomp.checkpoint.gguf_names import ARCHITECTURES, BLOCK, TENSORS
from llmcomp.checkpoint.gguf_tokenizer import check_gguf_tokenizer, save_gguf_tokenizer
from llmcomp.checkpoint.mapped import read_ahead
from llmcomp.errors import CheckpointError

BLOCK_NAME = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(\w+)\.(weight|bias)")
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
        self._codes: dict[str, GGUFCodes] = {}
        tensors: dict[str, TensorInfo] = {}
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            raise CheckpointError(
                source,
                f"GGUF architecture {str(name)[:80]!r} is not read, only {', '.join(ARCHITECTURES)}",
                INSTEAD,
            )
        self._architecture = ARCHITECTURES[name]
        for tensor in stored.values():
            known = _hf_name(tensor.name)
            if known is None:
                raise CheckpointError(
                    source,
                    f"tensor {tensor.name} is not one of a plain {name} model",
                    INSTEAD,
                )
            self._stored[known] = tensor
            dtype = PLAIN[tensor.kind][0] if tensor.kind in PLAIN else "F32"
            tensors[known] = TensorInfo(known, dtype, tensor.shape, path, tensor.begin, tensor.end)
        self.tensors = tensors
        self.config = make_config(self.metadata, self._architecture, tensors, source)
        self.generation_config = make_generation_config(self.metadata)
        self._check_decodable()
        self._path, self._map = path, np.memmap(path, np.uint8, "r")

    def prefetch(self, name: str, start: int, stop: int) -> None:
        tensor = self._stored[name]
        size = (tensor.end - tensor.begin) // max(tensor.shape[0], 1)
        read_ahead(self._path, tensor.begin + start * size, tensor.begin + stop * size)

    def rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        return self._decoded(name, self._order(name, start, stop))

    def picked(self, name: str, numbers: NDArray[np.int64]) -> NDArray[Any]:
        return self._decoded(name, np.arange(self._stored[name].shape[0])[self._order(name, 0, self._stored[name].shape[0])][numbers])

    def _decoded(self, name: str, stored: Any) -> NDArray[Any]:
        """Rows by their places in the file, a slice or numbers."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self._stored[name]
        count = tensor.shape[0]
        raw = np.asarray(self._map[tensor.begin : tensor.end])
        if tensor.kind in PLAIN:
            whole = np.frombuffer(raw, PLAIN[tensor.kind][1]).reshape(tensor.shape)
            return whole[stored]
        return np.ascontiguousarray(dequantize(raw.reshape(count, -1)[stored], GGMLQuantizationType(tensor.kind)), np.float32)

    def encoded(self, name: str) -> Encoded | None:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        tensor = self._stored[name]
        if tensor.kind in PLAIN:
            return None
        if name not in self._codes:
            kind = GGMLQuantizationType(tensor.kind)
            rows = partial(self._raw, name)
            self._codes[name] = GGUFCodes(tensor.kind, f"gguf {kind.name}", tensor.shape, GGML_QUANT_SIZES[kind][1], rows)
        return self._codes[name]

    def _raw(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes of rows [start, stop)."""
        tensor = self._stored[name]
        return np.asarray(self._map[tensor.begin : tensor.end]).reshape(tensor.shape[0], -1)[self._order(name, start, stop)]

    def _check_decodable(self) -> None:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        decodable = set(PLAIN)
        for name, tensor in self._stored.items():
            kind = GGMLQuantizationType(tensor.kind)
            if tensor.kind not in decodable:
                try:
                    dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
                except NotImplementedError:
                    raise CheckpointError(
                        self.source, f"tensor {tensor.name} is stored as {kind.name}, which is not decoded", INSTEAD
                    ) from None
                decodable.add(tensor.kind)
            if tensor.kind not in PLAIN and len(tensor.shape) != 2:
                raise CheckpointError(self.source, f"tensor {tensor.name} of shape {tensor.shape} is quantized, and not a matrix", INSTEAD)
            if self._permuted(name) and tensor.shape[0] % int(self.config["head_dim"]):
                raise CheckpointError(
                    self.source,
                    f"tensor {tensor.name} has {tensor.shape[0]} rows, which are no heads of {self.config['head_dim']}",
                    "Download or copy the file again",
                )

    def _permuted(self, name: str) -> bool:
        return self._architecture.permuted and name.rsplit(".", 2)[-2] in ("q_proj", "k_proj")

    def _order(self, name: str, start: int, stop: int) -> Any:
        """Which stored rows are rows [start, stop): in a head of d, stored row 2i+j is row j·d/2+i where llama.cpp has interleaved them."""
        if not self._permuted(name):
            return slice(start, stop)
        head = int(self.config["head_dim"])
        row = np.arange(start, min(stop, self._stored[name].shape[0]))
        inner = row % head
        return row - inner + inner % (head // 2) * 2 + inner // (head // 2)

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
