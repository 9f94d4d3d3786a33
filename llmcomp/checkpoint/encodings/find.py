"""Which encoding a checkpoint is stored in, and its tensors as the plain architecture names them."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from llmcomp.checkpoint.checkpoint import TensorInfo
from llmcomp.checkpoint.encodings.base import DecodedTensor, Encoding, shown, wrong
from llmcomp.errors import CheckpointError

KEYS = ("quantization_config", "compression_config")
"""Where a config.json tells it; the second is an older spelling of compressed-tensors."""
BESIDE = "hf_quant_config.json"
"""Where Model Optimizer tells it if config.json does not."""
NESTED = "text_config"
"""Composite architectures may tell it of their language model only."""


@cache
def _encodings() -> dict[str, type[Encoding]]:
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"{__package__}.{module.name}")
    return {method: one for one in Encoding.__subclasses__() for method in one.methods}


def find(config: Mapping[str, Any], file: Path) -> Encoding | None:
    """The encoding that `config`, read from `file`, tells of; None for plain weights.

    Raises:
        CheckpointError: it is none that is read, or a variant that is not.
    """
    settings = _settings(config) or _beside(file.parent / BESIDE)
    if not settings:
        return None
    method, known = _method(settings), _encodings()
    if method not in known:
        raise CheckpointError(
            str(file),
            f"it says that the weights are already quantized with {method}",
            f"Give the original float checkpoint; of quantized ones, {', '.join(sorted(known))} are read",
        )
    return known[method](settings, file)


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` without what it says of the encoding."""
    plain = {key: value for key, value in config.items() if key not in KEYS}
    if isinstance(plain.get(NESTED), dict):
        plain[NESTED] = {key: value for key, value in plain[NESTED].items() if key not in KEYS}
    return plain


def plain_tensors(encoding: Encoding, stored: Mapping[str, TensorInfo]) -> tuple[dict[str, TensorInfo], dict[str, DecodedTensor]]:
    """(tensors of the plain architecture, those of them that are decoded).

    Raises:
        CheckpointError: nothing is stored in this encoding, or parts of it are left over.
    """
    decoded = encoding.decoded(stored)
    if not decoded:
        raise CheckpointError(
            str(encoding.config),
            f"its weights are already quantized with {encoding.methods[0]}, it says, and no tensor is stored so",
            "Remove quantization_config if the weights are float, else download the checkpoint again",
        )
    for tensor in decoded.values():
        tensor.method = encoding.methods[0]
    home = {name: plain for plain, tensor in decoded.items() for name in tensor.parts}
    tensors: dict[str, TensorInfo] = {}
    for name, info in stored.items():
        plain = home.get(name)
        if plain is not None:
            tensors[plain] = decoded[plain].info
        elif name in decoded:
            raise wrong(info, f"{decoded[name].parts[0]} is the same weight, stored once more")
        elif name.endswith(encoding.suffixes):
            raise wrong(info, f"it is part of a weight quantized with {encoding.methods[0]} whose other parts are not in the checkpoint")
        else:
            tensors[name] = info
    return tensors, decoded


def _settings(config: Mapping[str, Any]) -> Any:
    nested = config.get(NESTED)
    places = [config, *([nested] if isinstance(nested, dict) else [])]
    return next((place[key] for place in places for key in KEYS if place.get(key)), None)


def _beside(file: Path) -> Any:
    """Settings that stand in a file of their own."""
    if not file.is_file():
        return None
    try:
        told = json.loads(file.read_text(encoding="utf8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(str(file), f"it is not JSON ({error})", "Download or copy the file again") from None
    return {"quant_method": "modelopt", **told} if isinstance(told, dict) and told.get("quantization") else None


def _method(settings: Any) -> str:
    """Old configs of bitsandbytes do not tell their method."""
    if not isinstance(settings, dict):
        return shown(settings)
    method = settings.get("quant_method")
    if method is None:
        return "bitsandbytes" if True in (settings.get("load_in_4bit"), settings.get("load_in_8bit")) else "an unnamed method"
    return method if isinstance(method, str) and len(method) < 80 and method.isprintable() else shown(method)
