"""Where training begins: a compressed model's codes, scales and zero points, and the factors that folds gave its float weights; kept in one file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from llmcomp import formats
from llmcomp.errors import ArchitectureError
from llmcomp.formats import CompressedWeight
from llmcomp.graph.match import find_tensor
from llmcomp.training.folding import Folded, apply_folds, is_turned
from llmcomp.training.quantized import Start, check_rank, quantize_weight

PARTS = ("codes", "scale", "zero_point")


@dataclass(frozen=True)
class Begun:
    """A compressed model, by the names of the checkpoint's tensors."""

    weights: Mapping[str, CompressedWeight]
    """[out, in] each."""
    columns: Mapping[str, NDArray[np.float32]]
    """Tensor -> [in]: folds have multiplied each row by it."""
    rows: Mapping[str, NDArray[np.float32]]
    """Tensor -> [out]: folds have multiplied each column by it then."""
    normed: Sequence[Sequence[str]]
    """Tensors that read the same norm."""

    def save(self, path: Path) -> None:
        arrays: dict[str, NDArray[Any]] = {}
        for name, weight in self.weights.items():
            arrays |= {f"{name}/{part}": value for part in PARTS if (value := getattr(weight, part)) is not None}
        for kind in ("columns", "rows"):
            arrays |= {f"{name}/{kind}": np.ascontiguousarray(value) for name, value in getattr(self, kind).items()}
        told = {name: [weight.format.name, weight.group_size, list(weight.shape)] for name, weight in self.weights.items()}
        save_file(arrays, path, {"weights": json.dumps(told), "normed": json.dumps(self.normed)})

    @classmethod
    def load(cls, path: Path) -> Begun:
        """Weights are read when they are asked for, each time anew: together they are a byte for each of the model's."""
        with safe_open(path, "numpy") as file:
            keys, told = list(file.keys()), file.metadata()
            columns, rows = (
                {key.removesuffix(f"/{kind}"): file.get_tensor(key) for key in keys if key.endswith(f"/{kind}")}
                for kind in ("columns", "rows")
            )
        return cls(_Kept(path, json.loads(told["weights"])), columns, rows, json.loads(told["normed"]))


class _Kept(Mapping[str, CompressedWeight]):
    """The weights of a file of `Begun.save`; `told` is format, group size and shape of each."""

    def __init__(self, path: Path, told: Mapping[str, tuple[str, int, list[int]]]) -> None:
        self.path, self.told = path, told

    def __getitem__(self, name: str) -> CompressedWeight:
        kind, group, shape = self.told[name]
        with safe_open(self.path, "numpy") as file:
            held = {key.rpartition("/")[2]: file.get_tensor(key) for part in PARTS if (key := f"{name}/{part}") in file.keys()}  # noqa: SIM118
        return CompressedWeight(formats.get(kind), tuple(shape), group, held["codes"], held["scale"], held.get("zero_point"))

    def __iter__(self) -> Iterator[str]:
        return iter(self.told)

    def __len__(self) -> int:
        return len(self.told)


def begin(
    model: Any, begun: Begun, tensors: Sequence[str], rank: int, trains_weights: bool = False, frozen: bool = False, seed: int = 0
) -> list[str]:
    """Make `model` compute exactly what the compressed model does, ready for training: folds applied, every compressed weight rounded as it is
    there, those of few bits with adapters of `rank`; the others stand still at what their codes are worth, but where all have 8 bits. `tensors` are the
    checkpoint's names. Returns the names of what is trained.

    Raises:
        ArchitectureError: a compressed weight that no linear module or embedding of the model holds.
        OptionError: a rank that is larger than a layer; nothing is changed then.
    """
    import torch

    modules = _modules(model, tensors)
    absent = [name for name in begun.weights if name not in modules]
    if absent:
        raise ArchitectureError(
            absent[0], "no linear module or embedding of the model holds it, and nothing else is trained", "Export without training"
        )
    kinds = {name: (weight.format.bits, weight.shape) for name, weight in begun.weights.items()}
    low = trained_of({name: bits for name, (bits, _) in kinds.items()})
    for name in low:
        check_rank(rank, kinds[name][1], name)
    first = {name: found[0][0] for name, found in modules.items()}
    apply_folds(
        model,
        Folded(
            {first[name]: value for name, value in begun.columns.items()},
            {first[name]: value for name, value in begun.rows.items()},
            [[first[name] for name in names] for names in begun.normed],
        ),
    )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    trained = []
    for number, (name, weight) in enumerate(begun.weights.items()):
        tied = [module for _, module in modules[name]]
        transposed = is_turned(tied[0])
        if name in low:
            quantize_weight(tied, Start(weight, transposed), rank, trains_weights, frozen, seed + number)
            trained += [full for full, _ in modules[name]]
        else:
            held = tied[0].weight.T if transposed else tied[0].weight
            with torch.no_grad():
                for run, tile in weight.stored().tiles():
                    held[run].copy_(torch.from_numpy(tile.dequantize()))
    return trained


def trained_of(bits: Mapping[str, int]) -> list[str]:
    """Of compressed weights those that are trained: of few bits, or all where all have 8."""
    return [name for name, own in bits.items() if own < 8] or list(bits)


def _modules(model: Any, tensors: Sequence[str]) -> dict[str, list[tuple[str, Any]]]:
    """Checkpoint tensor -> (name, module) that hold it as their weight; several where they are tied."""
    import torch
    from transformers.pytorch_utils import Conv1D

    prefix, held = getattr(model, "base_model_prefix", ""), set(tensors)
    found: dict[int, tuple[list[str], list[tuple[str, Any]]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding | Conv1D):
            tensor = find_tensor(f"{name}.weight", held, prefix)
            names, users = found.setdefault(id(module.weight), ([], []))
            users.append((name, module))
            names += [tensor] if tensor else []
    return {name: users for names, users in found.values() for name in names}
