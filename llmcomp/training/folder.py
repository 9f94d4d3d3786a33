"""A trained model as a checkpoint: codes in compressed-tensors' packing, which `--weight-format keep` takes over as they are, all else as floats.

weight_packed I32 (out, ceil(in bits / 32)) has unsigned codes, the lowest bits first; weight_zero_point I32 (ceil(out bits / 32), groups) likewise, down
the columns. Source: the documentation of compressed-tensors (https://github.com/vllm-project/compressed-tensors).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from llmcomp.formats import CompressedWeight
from llmcomp.training.quantized import original, quantized_weights

NAME = "model.safetensors"
WORD = 32
RUN = 1 << 22
"""Codes that are packed at a time."""
Way = tuple[int, bool, int]
"""Bits, whether there is no zero point, group size."""


def write_checkpoint(model: Any, still: Mapping[str, CompressedWeight], folder: Path) -> None:
    """Write `model`, whose trained weights are parametrized, into `folder`; `still` are the weights that have not been trained, by their parameters'
    names."""
    arrays: dict[str, NDArray[Any]] = {}
    ways: dict[str, Way] = {}

    def add(name: str, weight: CompressedWeight) -> None:
        # Packed at once: the codes of all would be a byte for each weight.
        arrays.update(packed(name.removesuffix(".weight"), weight))
        ways[name] = (weight.format.bits, weight.zero_point is None, weight.group_size)

    for name, weight in still.items():
        add(name, weight)
    shared: dict[int, str] = {}
    for name, module, one in quantized_weights(model):
        under = original(module)
        first = shared.setdefault(id(under), f"{name}.weight")
        if first == f"{name}.weight":
            add(first, one.compressed(under.detach()))
    weights = set(ways)
    known = {*weights, *(key for names in _tied(model, weights) for key in names)}
    for name, parameter in model.named_parameters():
        if ".parametrizations." not in name and name not in known:
            arrays[name] = parameter.detach().float().numpy()
    save_file(arrays, folder / NAME, {"format": "pt"})
    config = {**json.loads(model.config.to_json_string(use_diff=False)), "quantization_config": quantization_config(ways)}
    config.pop("compression_config", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf8")


def _tied(model: Any, weights: Collection[str]) -> list[list[str]]:
    """Names of parameters that are the same, those of them that are compressed."""
    by_parameter: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_parameter.setdefault(id(parameter), []).append(name)
    return [names for names in by_parameter.values() if any(name in weights for name in names)]


def packed(stem: str, weight: CompressedWeight) -> dict[str, NDArray[Any]]:
    """The tensors of one weight [out, in]."""
    bits, (rows, columns) = weight.format.bits, weight.shape
    codes = weight.codes.reshape(rows, columns)
    if codes.dtype != np.uint8:
        codes = (codes.astype(np.int16) + 2 ** (bits - 1)).astype(np.uint8)
    found: dict[str, NDArray[Any]] = {
        f"{stem}.weight_packed": _words(codes, bits),
        f"{stem}.weight_shape": np.array(weight.shape, np.int64),
        f"{stem}.weight_scale": np.ascontiguousarray(weight.scale.reshape(rows, -1)),
    }
    if weight.zero_point is not None:
        found[f"{stem}.weight_zero_point"] = np.ascontiguousarray(_words(weight.zero_point.reshape(rows, -1).T, bits).T)
    return found


def _words(codes: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """[lines, items] -> [lines, ceil(items bits / 32)]."""
    each = WORD // bits
    lines, items = codes.shape
    words = np.empty((lines, -(-items // each)), np.int32)
    step = max(1, RUN // max(1, items))
    for start in range(0, lines, step):
        part = codes[start : start + step]
        padded = np.zeros((len(part), words.shape[1] * each), np.uint32)
        padded[:, :items] = part
        shifted = padded.reshape(len(part), -1, each) << (np.arange(each, dtype=np.uint32) * np.uint32(bits))
        words[start : start + step] = np.bitwise_or.reduce(shifted, axis=-1).astype(np.uint32).view(np.int32)
    return words


def quantization_config(ways: Mapping[str, Way]) -> dict[str, Any]:
    """What config.json says of weights that are stored in these ways: one group for each of them."""
    users: dict[Way, list[str]] = {}
    for name, way in ways.items():
        users.setdefault(way, []).append(name.removesuffix(".weight"))
    groups = {}
    for number, ((bits, symmetric, size), names) in enumerate(users.items()):
        strategy = {"strategy": "channel"} if size == -1 else {"strategy": "group", "group_size": size}
        groups[f"group_{number}"] = {
            "targets": names,
            "weights": {"type": "int", "num_bits": bits, "symmetric": symmetric, "dynamic": False, **strategy},
        }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [],
    }
