"""A checkpoint with a PEFT LoRA adapter merged into it, row range by row range as it is read.

Source: Hu et al. 2021 (LoRA), W + s B A with s = alpha / rank; Kalajdzievski 2023 (rsLoRA), s = alpha / sqrt(rank); Liu et al. 2024 (DoRA), each
row of that scaled to the length that a learned vector gives it. Sums are in float32, and so is what is read.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.checkpoint.checkpoint import Checkpoint, TensorInfo
from llmcomp.checkpoint.encoded import Encoded
from llmcomp.checkpoint.folder import read_json
from llmcomp.checkpoint.header import read_header
from llmcomp.checkpoint.mapped import map_bytes
from llmcomp.checkpoint.stored import FLOATS
from llmcomp.errors import CheckpointError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
PART = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(?:\.default)?(?:\.weight)?"
)
CONV1D = ("decision_transformer", "gpt2", "imagegpt", "openai-gpt")
"""Model types whose linear layers are stored as [in, out], transformers' Conv1D."""
NEUTRAL = (True, False, None, "gaussian", "orthogonal", "eva")
"""Of init_lora_weights: what leaves the base model's weights alone. PiSSA, OLoRA, CorDA, LoRA-GA and LoftQ take something out of them."""
REFUSED = ("layer_replication", "target_parameters", "megatron_config", "alora_invocation_tokens", "arrow_config", "corda_config_active")
"""Settings that change more than weights, or weights that are no matrices of modules."""


@dataclass
class _Delta:
    """What is added to one matrix [out, in], stored so, or turned around as Conv1D stores it."""

    name: str
    a: NDArray[np.float32]
    """[rank, in]"""
    b: NDArray[np.float32]
    """[out, rank], the scale in it."""
    magnitude: NDArray[np.float32] | None = None
    """[out], DoRA's."""
    turned: bool = False
    """The stored matrix is [in, out]."""

    def merged(self, rows: NDArray[np.float32], start: int) -> NDArray[np.float32]:
        """Rows of the stored matrix from `start` on, with the adapter in them."""
        stop = start + len(rows)
        if self.turned:
            return rows + self.a[:, start:stop].T @ self.b.T
        rows = rows + self.b[start:stop] @ self.a
        if self.magnitude is None:
            return rows
        lengths = np.linalg.norm(rows, axis=1)
        if not lengths.all():
            row = start + int(np.argmin(lengths))
            raise CheckpointError(
                f"DoRA of {self.name}", f"row {row} has the length 0, which cannot be stretched", "Use an adapter without DoRA"
            )
        return rows * (self.magnitude[start:stop] / lengths)[:, None]


class AdaptedCheckpoint(Checkpoint):
    """`base` with the adapter of a folder merged into it."""

    plain = False

    def __init__(self, base: Checkpoint, folder: Path) -> None:
        """
        Raises:
            CheckpointError: no adapter in it, one that is no LoRA or has what is not read here, or one for another model.
        """
        self.base, self.adapter = base, folder
        self.source, self.folder, self.side_files = base.source, base.folder, base.side_files
        self.config, self.generation_config = base.config, base.generation_config
        self.open_arguments = {**base.open_arguments, "adapter": str(folder.resolve())}
        self._settings = _config(folder)
        self._stored = _weights(folder)
        self._deltas, self._saved = self._match()
        doubts = (base.doubt, _doubt(self._settings, base, folder), self._lacking(), self._idle())
        self.doubt = "; ".join(filter(None, doubts)) or None
        changed = {name: replace(base.tensors[name], dtype="F32") for name in (*self._deltas, *self._saved)}
        self.tensors = {**base.tensors, **changed}

    def rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        # PEFT saves an embedding whole beside what is added to it.
        saved = self._saved.get(name)
        rows = self.base.rows(name, start, stop) if saved is None else self._values(saved)[start:stop]
        delta = self._deltas.get(name)
        return (
            rows
            if delta is None
            else delta.merged(np.asarray(rows, np.float32), slice(start, stop).indices(self.tensors[name].shape[0])[0])
        )

    def picked(self, name: str, numbers: NDArray[np.int64]) -> NDArray[Any]:
        return super().picked(name, numbers) if name in self._deltas or name in self._saved else self.base.picked(name, numbers)

    def window(self, name: str, index: int | None, rows: slice, columns: slice) -> NDArray[Any]:
        if name in self._deltas or name in self._saved:
            return super().window(name, index, rows, columns)
        return self.base.window(name, index, rows, columns)

    def encoded(self, name: str) -> Encoded | None:
        return None if name in self._deltas or name in self._saved else self.base.encoded(name)

    def prefetch(self, name: str, start: int, stop: int) -> None:
        if name not in self._saved:
            self.base.prefetch(name, start, stop)

    def check_tokenizer(self) -> None:
        self.base.check_tokenizer()

    def save_tokenizer(self, folder: Path) -> None:
        self.base.save_tokenizer(folder)

    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.base.fingerprint().encode())
        for name in (CONFIG, WEIGHTS):
            digest.update((self.adapter / name).read_bytes())
        return digest.hexdigest()

    def _values(self, info: TensorInfo) -> NDArray[np.float32]:
        if info.dtype not in FLOATS:
            raise CheckpointError(f"{info.file}: tensor {info.name}", f"{info.dtype} is not read", "Use float32, float16 or bfloat16")
        values = map_bytes(info.file, info.begin, info.end).view(FLOATS[info.dtype]).reshape(info.shape).astype(np.float32)
        if not np.isfinite(values).all():
            raise CheckpointError(f"{info.file}: tensor {info.name}", "it holds NaN or Inf", "Use another adapter")
        return values

    def _match(self) -> tuple[dict[str, _Delta], dict[str, TensorInfo]]:
        """Tensor of the base -> what is added to it, and -> what takes its place."""
        parts: dict[str, dict[str, TensorInfo]] = {}
        saved: dict[str, TensorInfo] = {}
        for stored, info in self._stored.items():
            found = PART.fullmatch(stored)
            if found:
                parts.setdefault(found["module"].removeprefix(PREFIX), {})[found["part"]] = info
            else:
                name = self._name(stored, stored.removeprefix(PREFIX).replace(".modules_to_save.default", "").replace(".base_layer", ""))
                self._fit(info, self.base.tensors[name].shape, name)
                saved[name] = info
        return {self._name(f"{PREFIX}{module}", f"{module}.weight"): self._delta(module, own) for module, own in parts.items()}, saved

    def _name(self, stored: str, wanted: str) -> str:
        """The base's name of a tensor: with or without the outer model's prefix, as checkpoints of a base model alone leave it out."""
        for name in (wanted, wanted.partition(".")[2], f"model.{wanted}"):
            if name in self.base.tensors:
                return name
        raise CheckpointError(
            f"adapter {self.adapter}",
            f"it changes {stored.removeprefix(PREFIX)}, and {self.source} holds no {wanted}",
            "Give the base model that the adapter was trained on, or merge it with PEFT and give the result",
        )

    def _delta(self, module: str, own: Mapping[str, TensorInfo]) -> _Delta:
        name = self._name(f"{PREFIX}{module}", f"{module}.weight")
        embedding = "lora_embedding_A" in own
        names = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A", "lora_B")
        lacking = [part for part in names if part not in own]
        if lacking or len(self.base.tensors[name].shape) != 2:
            reason = f"it has no {lacking[0]} of {module}" if lacking else f"{name} is no matrix"
            raise CheckpointError(f"adapter {self.adapter}", reason, "Use a complete adapter of matrices")
        turned, shape = self._shape(name, embedding, *(own[part].shape for part in names))
        rank = own[names[0]].shape[0] if own[names[0]].shape else 0
        self._fit(own[names[0]], (rank, shape[1]), name)
        self._fit(own[names[1]], (shape[0], rank), name)
        magnitude = own.get("lora_magnitude_vector")
        if magnitude is not None:
            if turned:
                raise CheckpointError(
                    f"adapter {self.adapter}", f"DoRA of {name}, which is stored turned around, is not read", "Merge it with PEFT"
                )
            if math.prod(magnitude.shape) != shape[0]:
                self._fit(magnitude, (shape[0],), name)
        if rank != self._number_of(module, "r", "rank_pattern"):
            raise CheckpointError(
                f"adapter {self.adapter}",
                f"{own[names[0]].name} has rank {rank}, {CONFIG} says {self._number_of(module, 'r', 'rank_pattern'):g}",
                "Config and weights are of different versions: download or save both again",
            )
        scale = self._number_of(module, "lora_alpha", "alpha_pattern") / (math.sqrt(rank) if self._settings.get("use_rslora") else rank)
        vector = None if magnitude is None else self._values(magnitude).reshape(-1)
        return _Delta(name, self._values(own[names[0]]), self._values(own[names[1]]) * np.float32(scale), vector, turned)

    def _shape(self, name: str, embedding: bool, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[bool, tuple[int, ...]]:
        """(whether the matrix is stored as [in, out], its shape as [out, in]). Like PEFT by the kind of the layer, whatever the config says of it."""
        stored = tuple(self.base.tensors[name].shape)
        as_conv = self.base.config.get("model_type") in CONV1D if stored[0] == stored[1] else (*b[:1], *a[1:]) == stored[::-1]
        turned = embedding or as_conv
        return turned, stored[::-1] if turned else stored

    def _fit(self, info: TensorInfo, shape: tuple[int, ...], name: str) -> None:
        if tuple(info.shape) != tuple(shape) or 0 in info.shape:
            raise CheckpointError(
                f"adapter {self.adapter}",
                f"{info.name} has shape {list(info.shape)}, {name} wants {list(shape)}",
                "Give the base model that the adapter was trained on",
            )

    def _lacking(self) -> str | None:
        """Layers that the config names and the weights do not have, as when saving them was broken off."""
        targets, within = self._settings.get("target_modules"), ("layers_to_transform", "exclude_modules", "trainable_token_indices")
        if not isinstance(targets, list) or any(self._settings.get(name) for name in within):
            return None
        given = tuple(f".{target}.weight" for target in targets)
        bare = [
            name for name, info in self.base.tensors.items()
            if f".{name}".endswith(given) and len(info.shape) == 2 and name not in self._deltas and name not in self._saved
        ]  # fmt: skip
        return f"the adapter {self.adapter} has nothing for {len(bare)} layers that its config names, {bare[0]} for one" if bare else None

    def _idle(self) -> str | None:
        moving = self._saved or any(delta.magnitude is not None or (delta.a.any() and delta.b.any()) for delta in self._deltas.values())
        return None if moving else f"the adapter {self.adapter} changes nothing: its matrices are zero"

    def _number_of(self, module: str, name: str, own: str) -> float:
        """PEFT's: that of the first pattern of `own` that matches the module's name from its start, or from behind a dot, to its end, else `name`'s."""
        for pattern, value in (self._settings.get(own) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return _number(self.adapter, f"{own} {pattern}", value)
        return _number(self.adapter, name, self._settings.get(name))


def _doubt(settings: dict[str, Any], base: Checkpoint, folder: Path) -> str | None:
    """Shapes fit, but the adapter names another base: folders are copied and renamed, so that this is no error."""
    trained_on = settings.get("base_model_name_or_path")
    if not isinstance(trained_on, str) or not trained_on.strip("/\\"):
        return None
    theirs = re.split(r"[/\\]+", trained_on.strip("/\\"))[-1]
    names = {Path(base.source).name, Path(base.source).resolve().name, str(base.config.get("_name_or_path", "")).rpartition("/")[2]}
    if theirs.casefold() in {name.casefold() for name in names}:
        return None
    return f"the adapter {folder} says that it was trained on {trained_on}; it is merged into {base.source}, whose shapes fit"


def _number(folder: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(str(folder / CONFIG), f"{name} is {value!r}, no number", "Mend the file")
    return float(value)


def _config(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG).is_file():
        raise CheckpointError(str(folder), f"no {CONFIG} in it", "Give the folder that PEFT's save_pretrained wrote")
    settings = read_json(folder / CONFIG)
    if settings.get("peft_type") != "LORA":
        raise CheckpointError(str(folder), f"it is an adapter of type {settings.get('peft_type')!r}", "Only LORA is merged")
    start = settings.get("init_lora_weights", True)
    if start not in NEUTRAL:
        raise CheckpointError(
            str(folder / CONFIG),
            f"init_lora_weights is {start!r}, which may have changed the base model's weights too: what they were then is not known here",
            "Save it with PEFT's path_initial_model_for_weight_conversion, or merge it with PEFT and give the result",
        )
    for name in REFUSED:
        if settings.get(name):
            raise CheckpointError(str(folder / CONFIG), f"{name} is not merged here", "Merge the adapter with PEFT, and give the result")
    for name in ("alpha_pattern", "rank_pattern"):
        patterns = settings.get(name)
        if patterns is not None and not isinstance(patterns, dict):
            raise CheckpointError(str(folder / CONFIG), f"{name} is no map", "Mend the file")
        for pattern in patterns or {}:
            try:
                re.compile(pattern)
            except re.error as error:
                raise CheckpointError(str(folder / CONFIG), f"{name} {pattern!r} is no expression ({error})", "Mend the file") from None
    return settings


def _weights(folder: Path) -> Mapping[str, TensorInfo]:
    if (folder / WEIGHTS).is_file():
        found = read_header(folder / WEIGHTS)
        if not found:
            raise CheckpointError(
                str(folder / WEIGHTS), "it holds no tensor, so that nothing would be merged", "Download or save the adapter again"
            )
        return found
    pickled = (folder / "adapter_model.bin").is_file()
    raise CheckpointError(
        str(folder),
        "its weights are pickled" if pickled else f"no {WEIGHTS} in it",
        "Pickles can run code and are never opened: save the adapter as safetensors" if pickled else "Download the adapter again",
    )
