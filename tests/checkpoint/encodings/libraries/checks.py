"""What a library saved is decoded as the library decodes it, and `--weight-format keep` writes its codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from llmcomp import checkpoint
from llmcomp.checkpoint import Checkpoint
from tests.checkpoint.encodings.store import save
from tests.checkpoint.encodings.test_export import IDS
from tests.checkpoint.encodings.test_keep import check_same, exported
from tests.test_path import logits
from tests.tiny import tiny_llama
from tests.written import written_codes


def tiny_model(folder: Path) -> Any:
    """A tiny llama in float32, as transformers loads it; its folder is `folder`, with a tokenizer."""
    from transformers import AutoModelForCausalLM

    tiny_llama(folder, torch_dtype="float32")
    return AutoModelForCausalLM.from_pretrained(folder)


def check_values(folder: Path, wanted: dict[str, np.ndarray], rounding: float = 0.0) -> Checkpoint:
    """These tensors, and no others, are stored quantized, and are decoded as the library decodes them: to the bit, or but for `rounding` of each."""
    opened = checkpoint.open(folder)
    assert {name for name in opened.tensors if opened.encoded(name) is not None} == set(wanted)
    for name, values in wanted.items():
        assert values.dtype == np.float32 and values.std() > 1e-3
        np.testing.assert_allclose(opened.read(name), values, rtol=rounding, atol=0, err_msg=name)
    return opened


def check_kept(folder: Path, wanted: dict[str, np.ndarray], codes: dict[str, np.ndarray], tmp_path: Path, rounding: float = 0.0) -> None:
    """The kept model holds the codes and stands for the values; its logits are transformers' of the library's decoded weights."""
    import torch
    from transformers import AutoModelForCausalLM

    opened, plain = checkpoint.open(folder), tmp_path / "decoded"
    shutil.copytree(folder, plain, ignore=shutil.ignore_patterns("*.safetensors*", "hf_quant_config.json"))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    save(plain / "model.safetensors", {name: np.float32(wanted.get(name, opened.read(name))) for name in opened.tensors})
    report = exported(folder, tmp_path / "kept")
    check_same(tmp_path / "kept", report, plain, tmp_path, rounding)
    names = [layer["name"] for layer in report["layers"]]
    found = dict(zip((f"{name}.weight" for name in names), written_codes(tmp_path / "kept"), strict=True))
    assert {f"{layer['name']}.weight" for layer in report["layers"] if layer["rule"] == "stored"} == set(wanted) == set(codes)
    for name, numbers in codes.items():
        np.testing.assert_array_equal(found[name], numbers, err_msg=name)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(plain)(torch.from_numpy(IDS)).logits.numpy()
    ours = logits(tmp_path / "kept" / "openvino_model.xml", IDS)
    # Both sum some 160 products of float32 in each of fifteen layers, in orders of their own.
    assert theirs.std() > 0.1 and np.abs(ours - theirs).max() <= 3e-5 * np.abs(theirs).max()
