"""Models of several submodels, and single ones that generate no text: outputs of our float export through optimum's classes are transformers' own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcomp import compressing
from llmcomp.errors import OptionError
from llmcomp.export import dry_run, export, plan_model
from llmcomp.options import ExportOptions
from llmcomp.writing.stream import BinWriter
from tests.packed import packed_types

PROPERTIES = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
FLOAT, INT8 = 1e-5, 0.05
"""Largest difference over the largest output. Float: sums in another order, measured 4e-7. int8: a step is 1/127 of a row's largest weight and
these models have two layers, measured 0.002 to 0.017."""
TEXT: dict[str, Any] = {"vocab_size": 320, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
LLAMA: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256},
}
BERT: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
BART: dict[str, Any] = {
    **{"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
    **{"encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "decoder_start_token_id": 1},
}
IMAGE = 10


def models() -> dict[str, tuple[Any, str]]:
    """Name -> (a function that builds the model, optimum's class that runs the export)."""
    import transformers as t

    eyes = {**BERT, "image_size": 56, "patch_size": 14}
    return {
        "t5": (
            lambda: t.T5ForConditionalGeneration(
                t.T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0, **TEXT)
            ),
            "OVModelForSeq2SeqLM",
        ),
        "bart": (
            lambda: t.BartForConditionalGeneration(t.BartConfig(**BART, max_position_embeddings=64, forced_eos_token_id=0, **TEXT)),
            "OVModelForSeq2SeqLM",
        ),
        "whisper": (
            lambda: t.WhisperForConditionalGeneration(t.WhisperConfig(**BART, max_target_positions=64, **TEXT)),
            "OVModelForSpeechSeq2Seq",
        ),
        "bert": (lambda: t.BertModel(t.BertConfig(**BERT, vocab_size=320)), "OVModelForFeatureExtraction"),
        "classifier": (
            lambda: t.BertForSequenceClassification(t.BertConfig(**BERT, vocab_size=320, num_labels=3)),
            "OVModelForSequenceClassification",
        ),
        "vit": (lambda: t.ViTForImageClassification(t.ViTConfig(**eyes)), "OVModelForImageClassification"),
        "gemma3": (
            lambda: t.Gemma3ForConditionalGeneration(
                t.Gemma3Config(
                    text_config={**LLAMA, **TEXT, "sliding_window": 32},
                    vision_config=eyes,
                    image_token_index=IMAGE,
                    mm_tokens_per_image=4,
                    boi_token_index=11,
                    eoi_token_index=12,
                )
            ),
            "OVModelForVisualCausalLM",
        ),
    }


def inputs(name: str) -> dict[str, Any]:
    import torch

    torch.manual_seed(1)
    ids = torch.randint(20, 300, (2, 9))
    if name in ("bert", "classifier"):
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 56, 56)}
    if name == "whisper":
        return {"input_features": torch.randn(2, 80, 3000), "decoder_input_ids": ids[:, :4]}
    if name == "gemma3":
        ids = torch.cat([ids[:1, :3], torch.full((1, 4), IMAGE), ids[:1, 3:]], 1)
        pixels = torch.randn(1, 3, 56, 56)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels, "token_type_ids": (ids == IMAGE).long()}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": ids[:, :4]}


def build(name: str, folder: Path) -> Any:
    import torch

    torch.manual_seed(0)
    model = models()[name][0]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Off their starting values: an exporter drops a product with ones and a sum with zeros.
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def run(source: Path, out: Path, *options: tuple[str, Any]) -> dict[str, Any]:
    report = dict(export(ExportOptions(model=str(source), output=out, no_tokenizer=True, **dict(options))).report)
    assert report["fallback"] is None
    return report


def output(folder: Path, name: str) -> np.ndarray:
    import optimum.intel

    kind = getattr(optimum.intel, models()[name][1])
    found = kind.from_pretrained(folder, ov_config=PROPERTIES)(**inputs(name))
    return np.asarray(found["logits" if "logits" in found else "last_hidden_state"])


OFTEN = ("t5", "whisper", "bert", "gemma3")
RARELY = ("bart", "classifier", "vit")


@pytest.mark.parametrize("name", [*OFTEN, *(pytest.param(name, marks=pytest.mark.longest) for name in RARELY)])
def test_outputs_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    import torch

    model = build(name, tmp_path / "m")
    with torch.no_grad():
        found = model(**inputs(name))
    wanted = (found.logits if hasattr(found, "logits") else found.last_hidden_state).numpy()
    largest = np.abs(wanted).max()
    for format_, bound in (("fp32", FLOAT), ("int8", INT8)):
        report = run(tmp_path / "m", tmp_path / format_, ("weight_format", format_))
        assert np.abs(output(tmp_path / format_, name) - wanted).max() <= bound * largest
        files = sorted(path.stem for path in (tmp_path / format_).glob("openvino_*.bin"))
        assert files == sorted(one["name"] for one in report["submodels"])
        assert sum(one["bytes"]["bin"] for one in report["submodels"]) == report["bytes"]["bin"]
        assert "the whole model ran" in report["verified"]


def test_what_sees_keeps_eight_bits_and_the_rest_gets_four(tmp_path: Path) -> None:
    build("gemma3", tmp_path / "m")
    report = run(tmp_path / "m", tmp_path / "out", ("override", ("*vision*layers.0.mlp.fc1=int4_sym:32",)))
    by_model: dict[str, set[str]] = {}
    for layer in report["layers"]:
        if "layers.0.mlp.fc1" in layer["name"] and "vision" in layer["name"]:
            assert layer["format"] == "int4_sym" and layer["group_size"] == 32
        else:
            by_model.setdefault(layer["submodel"], set()).add(layer["format"])
    assert by_model == {
        "openvino_language_model": {"int4_asym", "int8_asym"},
        "openvino_text_embeddings_model": {"int8_asym"},
        "openvino_vision_embeddings_model": {"int8_asym"},
    }
    told = {
        kind: {line["tensor"] for line in report["tensors"] if line["fate"] == kind and not line["layers"]}
        for kind in ("kept float", "unused")
    }
    assert told == {"kept float": set(report["float_tensors"]), "unused": set(report["unused_tensors"])}
    assert {layer for line in report["tensors"] for layer in line["layers"]} == {layer["name"] for layer in report["layers"]}
    for file in ("report.md", "report.html"):
        assert all(name in (tmp_path / "out" / file).read_text() for name in by_model)
    assert "u4" in packed_types(tmp_path / "out" / "openvino_language_model.xml")
    plan = plan_model(ExportOptions(model=str(tmp_path / "m"), no_tokenizer=True))
    assert sum(entry.bytes for entry in plan.layers if "vision" not in entry.name) == sum(
        layer["bytes"] for layer in report["layers"] if "vision" not in layer["name"]
    )
    told = dry_run(ExportOptions(model=str(tmp_path / "m"), output=tmp_path / "none", no_tokenizer=True))
    run(tmp_path / "m", tmp_path / "plain")
    sizes = sum(path.stat().st_size for path in (tmp_path / "plain").glob("openvino_*.bin"))
    assert told.bin_bytes == sizes
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert config["model_type"] == "gemma3"


def test_an_encoder_and_a_decoder_share_a_table_under_two_names(tmp_path: Path) -> None:
    build("t5", tmp_path / "m")
    report = run(tmp_path / "m", tmp_path / "out", ("override", ("shared=int4_sym:32",)), ("ignored_scope", ("encoder.block.0.*",)))
    tables = [layer for layer in report["layers"] if layer["tensor"] == "shared.weight"]
    assert [(t["submodel"], t["format"]) for t in tables] == [
        ("openvino_encoder_model", "int4_sym"),
        ("openvino_decoder_model", "int8_asym"),
    ]
    assert len({t["name"] for t in tables}) == 2
    kept = [layer["name"] for layer in report["layers"] if layer["format"] == "keep"]
    assert kept and all(name.startswith("encoder.block.0.") for name in kept)


@pytest.mark.parametrize("option", ["gptq", "awq", "eval", "target_bpw"])
def test_what_needs_one_text_model_is_refused_by_name(option: str, tmp_path: Path) -> None:
    build("t5", tmp_path / "m")
    options = ExportOptions(
        model=str(tmp_path / "m"), output=tmp_path / "out", no_tokenizer=True, **{option: 5.0 if option == "target_bpw" else True}
    )
    with pytest.raises(OptionError, match=f"--{option.replace('_', '-')}.*openvino_encoder_model and openvino_decoder_model"):
        export(options)
    assert not (tmp_path / "out").exists()


def test_broken_off_between_submodels_it_goes_on_with_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("t5", tmp_path / "m")
    run(tmp_path / "m", tmp_path / "whole")
    written, write_ir = [], compressing.write_ir

    def interrupted(graph: Any, *rest: Any) -> None:
        if written:
            raise KeyboardInterrupt
        written.append(graph.skeleton.name)
        write_ir(graph, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(compressing, "write_ir", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "m", tmp_path / "out")
    computed = []
    kept = BinWriter.stream

    def counting(self: BinWriter, layers: Any, *rest: Any) -> None:
        layers = list(layers)
        computed.extend(layers)
        kept(self, layers, *rest)

    monkeypatch.setattr(BinWriter, "stream", counting)
    report = run(tmp_path / "m", tmp_path / "out", ("resume", True))
    assert written == ["openvino_encoder_model"] and not computed
    assert len(report["layers"]) == 36
    for name in ("openvino_encoder_model", "openvino_decoder_model"):
        for kind in ("xml", "bin"):
            whole, resumed = ((tmp_path / folder / f"{name}.{kind}").read_bytes() for folder in ("whole", "out"))
            assert whole == resumed
