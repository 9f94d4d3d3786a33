"""A local Hugging Face folder: config.json, one or many safetensors shards, tokenizer files."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.checkpoint.checkpoint import Checkpoint, TensorInfo
from llmcomp.checkpoint.encoded import Encoded
from llmcomp.checkpoint.encodings import DecodedTensor, find, plain_config, plain_tensors
from llmcomp.checkpoint.header import is_name, read_header
from llmcomp.checkpoint.mapped import map_bytes, read_ahead
from llmcomp.checkpoint.stored import FLOATS
from llmcomp.errors import CheckpointError, TokenizerError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tiktoken.model")
"""Files of which one makes a tokenizer."""
TOKENIZER_FILES = (
    *TOKENIZERS,
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
SIDE_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


class FolderCheckpoint(Checkpoint):
    """Opens headers, and the scales of quantized weights; `rows` maps those rows and no more, or decodes them."""

    def __init__(self, folder: Path, source: str) -> None:
        self.folder: Path = folder
        self.source = source
        self.open_arguments = {"source": str(folder)}
        self._stored_config = _config(folder)
        self.config = plain_config(self._stored_config)
        encoding = find(self._stored_config, folder / "config.json")
        self.generation_config = read_json(folder / "generation_config.json") if (folder / "generation_config.json").is_file() else None
        self._stored = _tensors(folder)
        self.plain = encoding is None
        self._decoded: dict[str, DecodedTensor] = {}
        self.tensors = self._stored
        if encoding is not None:
            self.tensors, self._decoded = plain_tensors(encoding, self._stored)
        self.side_files = [p for p in (folder / n for n in SIDE_FILES) if p.is_file()] + sorted(folder.glob("*.py"))

    def prefetch(self, name: str, start: int, stop: int) -> None:
        if name in self._decoded:
            return self._decoded[name].prefetch(start, stop)
        info = self.tensors[name]
        size = (info.end - info.begin) // max(info.shape[0], 1)
        read_ahead(info.file, info.begin + start * size, info.begin + stop * size)

    def picked(self, name: str, numbers: NDArray[np.int64]) -> NDArray[Any]:
        return self._decoded[name].picked(numbers) if name in self._decoded else super().picked(name, numbers)

    def window(self, name: str, index: int | None, rows: slice, columns: slice) -> NDArray[Any]:
        if name in self._decoded:
            return self._decoded[name].window(index, rows, columns)
        return super().window(name, index, rows, columns)

    def encoded(self, name: str) -> Encoded | None:
        return self._decoded.get(name)

    def rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        if name in self._decoded:
            return self._decoded[name].rows(start, stop)
        info = self.tensors[name]
        if info.dtype not in FLOATS:
            raise CheckpointError(
                f"{info.file}: tensor {name}", f"{info.dtype} weights are not read", "Use a float32, float16 or bfloat16 checkpoint"
            )
        if not info.shape:
            return map_bytes(info.file, info.begin, info.end).view(FLOATS[info.dtype]).reshape(())
        start, stop, _ = slice(start, stop).indices(info.shape[0])
        count = max(stop - start, 0)
        size = (info.end - info.begin) // max(info.shape[0], 1)
        # Offsets may be unaligned in old files; numpy reads such views correctly.
        raw = map_bytes(info.file, info.begin + start * size, info.begin + (start + count) * size)
        return raw.view(FLOATS[info.dtype]).reshape(count, *info.shape[1:])

    def check_tokenizer(self) -> None:
        if not any((self.folder / name).is_file() for name in TOKENIZERS):
            raise TokenizerError(
                str(self.folder), f"no tokenizer in it (none of {', '.join(TOKENIZERS[:3])}, ...)", "Add its files, or give --no-tokenizer"
            )

    def save_tokenizer(self, folder: Path) -> None:
        self.check_tokenizer()
        for name in TOKENIZER_FILES:
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, folder / name)
        for path in self.folder.glob("*.py"):
            shutil.copyfile(path, folder / path.name)

    def fingerprint(self) -> str:
        files = sorted({t.file for t in self._stored.values()})
        stats = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
        headers = [(t.name, t.dtype, t.shape, t.begin) for t in self._stored.values()]
        return hashlib.sha256(json.dumps([stats, headers, self._stored_config], sort_keys=True).encode()).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from an untrusted file."""
    try:
        value = json.loads(path.read_text(encoding="utf8"), parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(str(path), f"it is not JSON ({error})", "Download or copy the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError(str(path), "it is not a JSON object", "Download or copy the file again")
    return value


def _constant(name: str) -> float:
    """Infinity is no JSON either, and some configs have it."""
    if name == "NaN":
        raise ValueError("NaN is no number")
    return float(name)


def _config(folder: Path) -> dict[str, Any]:
    if any(folder.glob("openvino*model.xml")) and not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            str(folder),
            "it is already an OpenVINO model",
            "Give the Hugging Face checkpoint that it was made from; `llmcomp inspect` tells what it holds",
        )
    if not (folder / "config.json").is_file():
        raise CheckpointError(str(folder), "no config.json in it", _instead_of_config(folder))
    return read_json(folder / "config.json")


def _instead_of_config(folder: Path) -> str:
    names = sorted(p.name for p in folder.iterdir())
    gguf = next((n for n in names if n.endswith(".gguf")), None)
    if gguf:
        return f"Give the file itself: {folder / gguf}"
    if "adapter_config.json" in names:
        return "It is an adapter: merge it into its base model, and give that"
    return "Give the folder of the checkpoint itself" if names else "The folder is empty: download the model first"


def _tensors(folder: Path) -> dict[str, TensorInfo]:
    if (folder / INDEX).is_file():
        return _indexed(folder)
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    shards = sorted(folder.glob("*.safetensors"))
    if len(shards) == 1:
        return read_header(shards[0])
    if shards:
        raise CheckpointError(
            str(folder), f"{len(shards)} safetensors files and no {INDEX} to say which belong together", "Add the index, or keep one file"
        )
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
    if pickles:
        raise CheckpointError(
            str(folder),
            f"it has only pickled weights ({pickles[0]})",
            "Pickles can run code and are never opened: save the model as safetensors",
        )
    raise CheckpointError(str(folder), "no safetensors file in it", "Download the weights")


def _indexed(folder: Path) -> dict[str, TensorInfo]:
    index = read_json(folder / INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(str(folder / INDEX), "its weight_map is no map of tensors to files", "Download the index again")
    names = sorted(set(weight_map.values()))
    for name in names:
        # Backslashes and colons too: a folder that is refused on one system must not be read on another.
        if not is_name(name) or set(name) & set("/\\:") or name in (".", ".."):
            raise CheckpointError(
                str(folder / INDEX), f"it names a file outside the folder: {ascii(name)[:200]}", "Do not use this checkpoint"
            )
        if not name.endswith(".safetensors"):
            raise CheckpointError(
                str(folder / INDEX), f"it names a file that is no safetensors file: {name[:200]}", "Download the index again"
            )
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise CheckpointError(
            str(folder / INDEX),
            f"the index lists {len(names)} files, {len(names) - len(absent)} present: {', '.join(absent[:5])}{' ...' if len(absent) > 5 else ''} missing",
            "Download the missing shards",
        )
    tensors: dict[str, TensorInfo] = {}
    for name in names:
        for tensor, info in read_header(folder / name).items():
            if weight_map.get(tensor) != name:
                told = weight_map.get(tensor)
                reason = f"{name} holds {tensor}, which the index {f'expects in {told}' if told else 'does not list'}"
                raise CheckpointError(str(folder / INDEX), reason, "Index and shards are of different versions: download both again")
            tensors[tensor] = info
    lost = [t for t in weight_map if t not in tensors]
    if lost:
        raise CheckpointError(
            str(folder / INDEX),
            f"it expects {ascii(lost[0])[1:-1][:200]} in {weight_map[lost[0]]}, which does not hold it"
            + (f", and {len(lost) - 1} more" if len(lost) > 1 else ""),
            "Index and shards are of different versions: download both again",
        )
    _check_total(folder / INDEX, index.get("metadata"), sum(t.end - t.begin for t in tensors.values()))
    return tensors


def _check_total(path: Path, metadata: Any, held: int) -> None:
    told = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(told, int | float) and told != held:
        raise CheckpointError(
            str(path),
            f"it says total_size {told}, and the tensors of its shards have {held} bytes",
            "Download index and shards again; if the shards are right, correct total_size in the index or remove it",
        )
