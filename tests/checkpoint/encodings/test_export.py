"""A quantized checkpoint is exported as the float checkpoint that it decodes to."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from llmcomp import checkpoint
from llmcomp.errors import ArchitectureError, OptionError
from llmcomp.export import export
from llmcomp.judging import check_judgeable
from llmcomp.options import ExportOptions
from tests.calibration import architectures
from tests.checkpoint.encodings import test_compressed_tensors, test_fp8, test_gptq, test_mxfp4
from tests.checkpoint.encodings.store import save
from tests.test_path import logits
from tests.tiny import tiny_llama

IDS = np.array([[5, 9, 90, 17, 42, 8, 11, 3]])


def fp8(name: str, weight: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    scale = np.full([-(-n // 128) for n in weight.shape], 2.0**-9 * 1.3, np.float32)
    codes = (weight.astype(np.float32) / scale[0, 0]).astype(ml_dtypes.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": scale}, test_fp8.textbook(codes, scale, (128, 128))


def gptq(name: str, weight: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    parts, values = test_gptq.made(4, weight.shape[1], weight.shape[0], 32)
    return {part.replace(test_gptq.X, name.removesuffix(".weight")): stored for part, stored in parts.items()}, values


def compressed(name: str, weight: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    parts, values = test_compressed_tensors.made(4, weight.shape[0], weight.shape[1], 32, False)
    return {part.replace(test_compressed_tensors.X, name.removesuffix(".weight")): stored for part, stored in parts.items()}, values


def mxfp4(name: str, weight: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    parts, values = test_mxfp4.made(weight.shape[0], weight.shape[2], weight.shape[1] // 32, (117, 120))
    return {part.replace(test_mxfp4.X, name): stored for part, stored in parts.items()}, values


Kinds = dict[str, tuple[Callable[[str, np.ndarray], tuple[dict[str, np.ndarray], np.ndarray]], Any]]
KINDS: Kinds = {
    "fp8": (fp8, test_fp8.SETTINGS),
    "gptq": (gptq, test_gptq.settings()),
    "compressed-tensors": (compressed, test_compressed_tensors.settings(test_compressed_tensors.scheme(symmetric=False))),
    "fp8 experts": (fp8, test_fp8.SETTINGS),
    "mxfp4 experts": (mxfp4, test_mxfp4.SETTINGS),
}
MIXTURES = {"fp8 experts": "qwen3_moe", "mxfp4 experts": "gpt_oss"}
"""One stores its experts one by one, the other in stacks."""
WHAT = {"mxfp4 experts": 3}
"""Axes of the weights that are stored so."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMCOMP_CACHE", str(tmp_path / "cache"))


def made(folder: Path, kind: str, kinds: Kinds = KINDS) -> tuple[Path, Path]:
    """(a checkpoint that is stored so, the float checkpoint of the same weights): a tiny llama, and a mixture where that is its kind."""
    encode, settings = kinds[kind]
    plain, encoded = folder / "plain", folder / "encoded"
    if kind in MIXTURES:
        architectures.save(MIXTURES[kind], plain)
        opened = checkpoint.open(plain)
        tensors = {name: opened.read(name) for name in opened.tensors}
    else:
        tensors = tiny_llama(plain)
    shutil.copytree(plain, encoded)
    kept, values = {}, {}
    for name, weight in tensors.items():
        if "_proj" in name and weight.ndim == WHAT.get(kind, 2) and not name.endswith("_bias"):
            parts, values[name] = encode(name, weight)
            kept |= parts
        else:
            kept[name] = values[name] = weight
    save(encoded / "model.safetensors", kept)
    save(plain / "model.safetensors", values)
    config = json.loads((plain / "config.json").read_text())
    (encoded / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return encoded, plain


def exported(source: Path, out: Path, **options: Any) -> Path:
    export(ExportOptions(model=str(source), output=out, weight_format="int8", no_tokenizer=True, verify="none", **options))
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_float_checkpoint(tmp_path: Path, kind: str) -> None:
    encoded, plain = made(tmp_path, kind)
    out, wanted = exported(encoded, tmp_path / "out"), exported(plain, tmp_path / "wanted")
    ours, theirs = (logits(folder / "openvino_model.xml", IDS) for folder in (out, wanted))
    assert np.isfinite(theirs).all() and theirs.std() > 0.1
    np.testing.assert_array_equal(ours, theirs)
    assert (out / "openvino_model.bin").read_bytes() == (wanted / "openvino_model.bin").read_bytes()
    assert "quantization_config" not in json.loads((out / "config.json").read_text())


def test_no_other_loader_is_tried(tmp_path: Path) -> None:
    """What the architecture wants and the decoded tensors are not: transformers would read the stored ones as weights."""
    encoded, _ = made(tmp_path, "gptq")
    config = json.loads((encoded / "config.json").read_text())
    (encoded / "config.json").write_text(json.dumps({**config, "intermediate_size": 128}))
    with pytest.raises(ArchitectureError, match=r"skeleton cannot be made.*plain safetensors checkpoint"):
        exported(encoded, tmp_path / "out")
    (encoded / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ArchitectureError, match=r"tensors that the architecture needs are not in it"):
        exported(encoded, tmp_path / "out")


def test_it_is_no_float_reference(tmp_path: Path) -> None:
    encoded, _ = made(tmp_path, "fp8")
    with pytest.raises(OptionError, match=r"stored quantized.*--weight-format fp32"):
        check_judgeable(checkpoint.open(encoded), None, "--eval")
