"""AutoRound, which packs for AutoGPTQ and AutoAWQ too, against the layers of its own that run what it packed."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.encodings.libraries.checks import check_kept, check_values, tiny_model
from tests.checkpoint.encodings.test_keep import cache  # noqa: F401

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gptq": ("auto_gptq", {}),
    "gptq with zero points": ("auto_gptq", {"sym": False}),
    "gptq of 2 bits": ("auto_gptq", {"bits": 2}),
    "gptq of 3 bits": ("auto_gptq", {"bits": 3, "sym": False}),
    "gptq of 8 bits": ("auto_gptq", {"bits": 8}),
    "awq": ("auto_awq", {}),
    "awq with zero points": ("auto_awq", {"sym": False}),
    "auto-round": ("auto_round", {}),
    "auto-round with zero points": ("auto_round", {"sym": False}),
}


def saved(kind: str, tmp_path: Path) -> tuple[Path, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(the folder, values, codes) of the quantized weights, by the library: rounded to the nearest, which looks at no data."""
    from transformers import AutoTokenizer

    # NNCF makes its own class of loggers everybody's, with a method that AutoRound's loggers have too, for other arguments.
    logging.setLoggerClass(logging.Logger)
    from auto_round import AutoRound

    form, told = KINDS[kind]
    model = tiny_model(tmp_path / "source")
    quantizer = AutoRound(
        model,
        AutoTokenizer.from_pretrained(tmp_path / "source"),
        **{"scheme": "W4A16", "group_size": 32, "iters": 0, "disable_opt_rtn": True, "device_map": "cpu", **told},
    )
    quantizer.quantize_and_save(str(tmp_path / "saved"), format=form)
    (config,) = (tmp_path / "saved").rglob("config.json")
    values, codes = theirs(config.parent)
    return config.parent, values, codes


def theirs(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(values, codes) by the library's layers, in float32: in their float16 the products of codes and scales would be rounded."""
    import torch
    from safetensors.torch import load_file

    told = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors: dict[str, Any] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    # With zero points it packs as AWQ does unless told otherwise.
    decode = by_awq if "awq" in told.get("packing_format", told["quant_method"]) else by_gptq
    values, codes = {}, {}
    for stem in (name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")):
        parts = {end: tensors[f"{stem}.{end}"] for end in ("qweight", "qzeros", "scales")}
        plain = torch.zeros_like(parts["qzeros"]), torch.ones_like(parts["scales"], dtype=torch.float32)
        for found, zeros, scales in ((values, parts["qzeros"], parts["scales"].float()), (codes, *plain)):
            found[f"{stem}.weight"] = decode({**parts, "qzeros": zeros, "scales": scales}, told["bits"], told["group_size"]).numpy()
    return values, codes


def by_gptq(parts: dict[str, Any], bits: int, size: int) -> Any:
    """Without g_idx, which is in order: with it the layer drops outputs where there are more of them than inputs."""
    import torch
    from auto_round.export.utils import get_autogptq_packing_qlinear

    out, width = parts["scales"].shape[1], parts["qweight"].shape[0] * 32 // bits
    layer = get_autogptq_packing_qlinear("auto_gptq", bits, size)(bits, size, width, out, False).float()
    layer.load_state_dict(parts)
    return layer(torch.eye(width)).T.contiguous()


def by_awq(parts: dict[str, Any], bits: int, size: int) -> Any:
    from auto_round.export.export_to_awq.utils import dequantize_gemm

    return dequantize_gemm(parts["qweight"], parts["qzeros"], parts["scales"], bits, size).T.contiguous()


@pytest.mark.parametrize("kind", KINDS)
def test_values(tmp_path: Path, kind: str) -> None:
    folder, values, _ = saved(kind, tmp_path)
    assert len(values) == 14
    check_values(folder, values)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.longest) for kind in ("gptq with zero points", "awq with zero points", "auto-round")]
)
def test_keep(tmp_path: Path, kind: str) -> None:
    folder, values, codes = saved(kind, tmp_path)
    # Codes with zero points are u4; OpenVINO's i4 is signed. Layers of GPTQ take 1 off for a zero point that is stored as 0.
    offset = (0 if "awq" in kind else 1) - (0 if "zero points" in kind else 8)
    check_kept(folder, values, {name: one + np.float32(offset) for name, one in codes.items()}, tmp_path)
