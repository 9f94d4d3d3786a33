"""Adapters merged as rows are read, against PEFT's own merge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmcomp import checkpoint as checkpoints
from llmcomp.errors import CheckpointError, OptionError
from llmcomp.export import export
from llmcomp.options import ExportOptions
from tests.calibration.architectures import save
from tests.test_path import logits

TARGETS = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"r": 4, "lora_alpha": 16}),
    "root of the rank": ("llama", {"r": 4, "lora_alpha": 16, "use_rslora": True}),
    "patterns": ("llama", {"r": 4, "lora_alpha": 16, "rank_pattern": {"v_proj": 8}, "alpha_pattern": {"layers.1.self_attn.v_proj": 3}}),
    "dora": ("llama", {"r": 4, "lora_alpha": 8, "use_dora": True}),
    "saved modules": ("llama", {"r": 4, "lora_alpha": 8, "modules_to_save": ["lm_head"]}),
    "an embedding": ("llama", {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "q_proj"]}),
    "biases": ("gpt2", {"r": 4, "lora_alpha": 8, "bias": "all"}),
    "inputs first": ("gpt2", {"r": 4, "lora_alpha": 8, "fan_in_fan_out": True}),
    "drawn otherwise": ("llama", {"r": 4, "lora_alpha": 8, "init_lora_weights": "gaussian"}),
}


def adapted(name: str, folder: Path, **settings: Any) -> Any:
    """Save a base model and an adapter on it that does something; returns PEFT's merged model."""
    import peft
    import torch

    torch.manual_seed(1)
    base = save(name, folder / "m")
    model = peft.get_peft_model(base, peft.LoraConfig(**{"target_modules": TARGETS[name], **settings}))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key or "modules_to_save" in key or parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder / "adapter")
    return model.merge_and_unload()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_is_what_peft_merges(tmp_path: Path, kind: str) -> None:
    name, settings = KINDS[kind]
    merged = adapted(name, tmp_path, **settings).state_dict()
    opened = checkpoints.open(tmp_path / "m", adapter=tmp_path / "adapter")
    plain = checkpoints.open(tmp_path / "m")
    changed = 0
    for tensor in opened.tensors:
        wanted = merged[tensor].float().numpy()
        # Sums of a few products of numbers about 1, in another order.
        np.testing.assert_allclose(opened.read(tensor), wanted, atol=2e-6)
        if wanted.ndim == 2:
            np.testing.assert_array_equal(opened.rows(tensor, 3, 7), opened.read(tensor)[3:7])
            np.testing.assert_array_equal(opened.picked(tensor, np.array([5, 0])), opened.read(tensor)[[5, 0]])
        changed += not np.array_equal(plain.read(tensor), wanted)
    assert changed >= 3
    assert opened.fingerprint() != plain.fingerprint() and opened.values_digest() != plain.values_digest()


def test_an_export_with_an_adapter_is_that_of_the_merged_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("LLMCOMP_CACHE", str(tmp_path / "cache"))
    merged = adapted("llama", tmp_path, r=4, lora_alpha=16, use_dora=True)
    merged.save_pretrained(tmp_path / "merged")
    low: dict[str, Any] = {"weight_format": "int8", "no_tokenizer": True}
    export(ExportOptions(model=str(tmp_path / "m"), adapter=tmp_path / "adapter", output=tmp_path / "a", **low))
    export(ExportOptions(model=str(tmp_path / "merged"), output=tmp_path / "b", **low))
    ids = np.random.default_rng(0).integers(1, 90, (1, 20))
    found, wanted = (logits(tmp_path / name / "openvino_model.xml", ids) for name in "ab")
    with torch.no_grad():
        float_logits = merged(torch.from_numpy(ids)).logits.numpy()
    # Weights that differ in their last bit may take another code.
    assert np.abs(found - wanted).max() < 0.1 * np.abs(wanted - float_logits).max() + 1e-5


@pytest.mark.parametrize(
    ("trained_on", "told"),
    [("maker/m", False), ("M/", False), ("", False), (None, False), ("somewhere/else", True), ("C:\\models\\other", True)],
)
def test_an_adapter_that_names_another_base_is_told(tmp_path: Path, trained_on: str | None, told: bool) -> None:
    adapted("llama", tmp_path, r=4, lora_alpha=16)
    change(tmp_path / "adapter", {"base_model_name_or_path": trained_on})
    doubt = checkpoints.open(tmp_path / "m", adapter=tmp_path / "adapter").doubt
    assert doubt == (f"the adapter {tmp_path / 'adapter'} says that it was trained on {trained_on}; it is merged into {tmp_path / 'm'}, "
    "whose shapes fit" if told else None)  # fmt: skip


def test_the_doubt_is_a_warning_of_the_report(tmp_path: Path) -> None:
    adapted("llama", tmp_path, r=4, lora_alpha=16)
    change(tmp_path / "adapter", {"base_model_name_or_path": "somewhere/else"})
    options = ExportOptions(model=str(tmp_path / "m"), adapter=tmp_path / "adapter", output=tmp_path / "out", no_tokenizer=True)
    assert any("trained on somewhere/else" in text for text in export(options).report["warnings"])


def change(folder: Path, settings: dict[str, Any] | None = None, **tensors: np.ndarray) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **(settings or {})}))
    stored = load_file(folder / "adapter_model.safetensors")
    save_file({**stored, **tensors}, folder / "adapter_model.safetensors")


SQUARE = "model.layers.0.self_attn.q_proj.weight"
A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: change(f, {"peft_type": "IA3"}), "type 'IA3'"),
        (lambda f: change(f, {"lora_alpha": "16"}), "lora_alpha is '16'"),
        (lambda f: change(f, {"alpha_pattern": {"(": 3}}), "no expression"),
        (lambda f: change(f, {"r": 8}), "lora_A.weight has rank 4, adapter_config.json says 8"),
        (lambda f: change(f, {"r": 0}), "has rank 4, adapter_config.json says 0"),
        (lambda f: change(f, {"rank_pattern": {"v_proj": 2}}), r"v_proj.lora_A.weight has rank 4, adapter_config.json says 2"),
        (lambda f: change(f, {"rank_pattern": [2]}), "rank_pattern is no map"),
        (lambda f: save_file({}, f / "adapter_model.safetensors"), "holds no tensor"),
        (lambda f: change(f, {"init_lora_weights": "pissa_niter_4"}), "init_lora_weights is 'pissa_niter_4'"),
        (lambda f: change(f, {"init_lora_weights": "olora"}), "init_lora_weights is 'olora'"),
        (lambda f: change(f, {"layer_replication": [[0, 2]]}), "layer_replication"),
        (lambda f: change(f, **{A: np.zeros((4, 63), np.float32)}), r"q_proj.lora_A.weight has shape \[4, 63\]"),
        (lambda f: change(f, **{A: np.zeros((0, 64), np.float32)}), "has shape"),
        (lambda f: change(f, **{A: np.full((4, 64), np.nan, np.float32)}), "NaN"),
        (lambda f: change(f, **{A.replace("layers.0", "layers.9"): np.zeros((4, 64), np.float32)}), r"layers\.9.*base model"),
        (lambda f: change(f, **{"base_model.model.something": np.zeros(3, np.float32)}), "something"),
        (lambda f: (f / "adapter_config.json").unlink(), "no adapter_config.json"),
        (lambda f: (f / "adapter_model.safetensors").rename(f / "adapter_model.bin"), "pickled"),
    ],
)
def test_what_cannot_be_merged_is_refused(tmp_path: Path, damage: Any, words: str) -> None:
    adapted("llama", tmp_path, r=4, lora_alpha=16)
    damage(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=words):
        checkpoints.open(tmp_path / "m", adapter=tmp_path / "adapter")


def test_what_a_config_promises_and_the_weights_lack_is_told(tmp_path: Path) -> None:
    adapted("llama", tmp_path, r=4, lora_alpha=16)
    assert checkpoints.open(tmp_path / "m", adapter=tmp_path / "adapter").doubt is None
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    whole = load_file(path)
    save_file({name: value for name, value in whole.items() if "layers.1" not in name}, path)
    doubt = checkpoints.open(tmp_path / "m", adapter=tmp_path / "adapter").doubt
    assert doubt is not None and "nothing for 3 layers" in doubt and "model.layers.1." in doubt
    save_file({name: value * ("lora_A" in name) for name, value in whole.items()}, path)
    doubt = checkpoints.open(tmp_path / "m", adapter=tmp_path / "adapter").doubt
    assert doubt is not None and doubt.endswith("changes nothing: its matrices are zero")


def test_the_kind_of_a_layer_says_how_it_is_stored_whatever_the_config_says(tmp_path: Path) -> None:
    """As PEFT, which sets fan_in_fan_out right for each layer."""
    adapted("llama", tmp_path, r=4, lora_alpha=16)
    before = checkpoints.open(tmp_path / "m", adapter=tmp_path / "adapter").read(SQUARE)
    change(tmp_path / "adapter", {"fan_in_fan_out": True})
    np.testing.assert_array_equal(checkpoints.open(tmp_path / "m", adapter=tmp_path / "adapter").read(SQUARE), before)


def test_dora_of_a_row_of_zeros(tmp_path: Path) -> None:
    adapted("llama", tmp_path, r=4, lora_alpha=8, use_dora=True)
    change(tmp_path / "adapter", **{A.replace("_A", "_B"): np.zeros((64, 4), np.float32)})
    path = tmp_path / "m" / "model.safetensors"
    stored = load_file(path)
    stored[SQUARE][5] = 0
    save_file(stored, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"DoRA of .*q_proj.weight: row 5 has the length 0"):
        checkpoints.open(tmp_path / "m", adapter=tmp_path / "adapter").read(SQUARE)


def test_nothing_is_judged_against_another_model() -> None:
    with pytest.raises(OptionError, match="--adapter"):
        ExportOptions(model="m", adapter=Path("a"), eval=True)
