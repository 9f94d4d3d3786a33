"""The whole path on a two-layer model: checkpoint in, verified folder out, loaded by those who will use it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import openvino as ov
import pytest

from llmcomp.errors import CheckpointError, NonFiniteWeightError, OptionError, OutputError, PrecisionError
from llmcomp.export import export, plan_model
from llmcomp.judge import JudgeError, evaluate
from llmcomp.options import ExportOptions
from tests.checkpoint.gguf_file import write_gguf
from tests.dequantize import dequantized_ir
from tests.packed import packed_types
from tests.tiny import save_shards, tiny_llama

PROPERTIES = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One skeleton cache for the module: the architecture is traced once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMCOMP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "tiny"
    tiny_llama(folder)
    return folder


@pytest.fixture(scope="module")
def exported(checkpoint: Path, cache: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "int4"
    export(ExportOptions(model=str(checkpoint), output=out, group_size=32))
    return out


def logits(xml: Path, ids: np.ndarray) -> np.ndarray:
    compiled = ov.Core().compile_model(xml, "CPU", PROPERTIES)
    feed = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "position_ids": np.arange(ids.shape[1])[None],
        "beam_idx": np.zeros(1, np.int32),
    }
    names = {n for i in compiled.inputs for n in i.get_names()}
    return compiled.create_infer_request().infer({k: v for k, v in feed.items() if k in names})[0]


def test_everything_is_in_the_folder(exported: Path) -> None:
    names = {p.name for p in exported.iterdir()}
    models = {f"openvino_{m}.{e}" for m in ("model", "tokenizer", "detokenizer") for e in ("xml", "bin")}
    others = {
        "config.json",
        "generation_config.json",
        "openvino_config.json",
        "report.json",
        "report.md",
        "report.html",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert models | others <= names
    assert not [n for n in names if n.startswith(".") or n.endswith(".jsonl")]


def test_the_report_accounts_for_every_tensor(exported: Path, checkpoint: Path) -> None:
    import safetensors

    stored = set()
    for shard in checkpoint.glob("*.safetensors"):
        with safetensors.safe_open(shard, "np") as file:
            stored |= set(file.keys())
    report = json.loads((exported / "report.json").read_text())
    told = {layer["tensor"] for layer in report["layers"]} | set(report["float_tensors"]) | set(report["unused_tensors"])
    assert told == stored
    assert report["bytes"]["bin"] == (exported / "openvino_model.bin").stat().st_size
    assert {layer["format"] for layer in report["layers"]} == {"int4_asym", "int8_asym"}
    assert "the whole model ran" in report["verified"]


def test_logits_are_those_of_the_dequantized_weights(exported: Path, checkpoint: Path, tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 200, (1, 12))
    wanted = logits(dequantized_ir(exported, checkpoint, tmp_path), ids)
    # Both run in f32 on the same plugin; a packed kernel sums in another order than a float one.
    np.testing.assert_allclose(logits(exported / "openvino_model.xml", ids), wanted, rtol=1e-3, atol=1e-4)


def test_the_compiled_model_keeps_its_weights_packed(exported: Path) -> None:
    assert packed_types(exported / "openvino_model.xml") == {"u4", "u8"}


@pytest.mark.parametrize("weight_format", ["int4", "int8"])
def test_compressing_twice_is_refused_with_what_is_there(exported: Path, tmp_path: Path, weight_format: str) -> None:
    """By the report's formats, or without one, as with a model of another tool, by the types of the constants."""
    told = r"already compressed: int4_asym \(14 layers\), int8_asym \(1 layer\)"
    with pytest.raises(CheckpointError, match=told):
        export(ExportOptions(model=str(exported), output=tmp_path / "out", weight_format=weight_format))
    other = tmp_path / "other"
    shutil.copytree(exported, other)
    (other / "report.json").unlink()
    with pytest.raises(CheckpointError, match=r"already compressed: int4 \(14 layers\), int8 \(1 layer\)"):
        plan_model(ExportOptions(model=str(other), weight_format=weight_format))
    assert not (tmp_path / "out").exists()


def test_a_model_is_never_written_over_its_source(exported: Path, tmp_path: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in exported.iterdir()}
    for output in (exported, exported.parent, exported / ".." / exported.name):
        with pytest.raises(OutputError, match="it is the input"):
            export(ExportOptions(model=str(exported), output=output, overwrite=True))
    assert {path.name: path.stat().st_mtime_ns for path in exported.iterdir()} == before


def test_blocks_run_alone_where_every_head_has_its_own_keys(cache: Any, tmp_path: Path) -> None:
    """There the length of the first block's state is asked for, and nothing of the block that writes it is in another block's cut."""
    tiny_llama(tmp_path / "m", num_key_value_heads=6)
    result = export(ExportOptions(model=str(tmp_path / "m"), output=tmp_path / "out", no_tokenizer=True, verify="structure"))
    assert "block 0, block 1 and the head ran" in result.report["verified"]


def test_optimum_loads_and_runs_it(exported: Path) -> None:
    import torch
    from optimum.intel import OVModelForCausalLM

    model = OVModelForCausalLM.from_pretrained(exported, ov_config=PROPERTIES)
    ids = np.arange(8)[None]
    out = model(input_ids=torch.from_numpy(ids), attention_mask=torch.ones(1, 8, dtype=torch.int64)).logits
    np.testing.assert_allclose(out.numpy(), logits(exported / "openvino_model.xml", ids), rtol=1e-4, atol=1e-5)
    assert model.generate(input_ids=torch.from_numpy(ids), max_new_tokens=4, min_new_tokens=4).shape == (1, 12)


def test_genai_loads_and_runs_it(exported: Path) -> None:
    import openvino_genai as genai

    assert isinstance(genai.LLMPipeline(str(exported), "CPU").generate("ab", max_new_tokens=4), str)


def test_a_second_run_gives_the_same_bytes_from_the_cached_skeleton(exported: Path, checkpoint: Path, cache: Any, tmp_path: Path) -> None:
    class Notes:
        said: ClassVar[list[str]] = []

        def note(self, text: str) -> None:
            self.said.append(text)

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: None

    export(ExportOptions(model=str(checkpoint), output=tmp_path / "again", group_size=32), Notes())  # type: ignore[arg-type]
    assert any("cache" in text for text in Notes.said)
    for name in ("openvino_model.bin", "openvino_model.xml"):
        assert (tmp_path / "again" / name).read_bytes() == (exported / name).read_bytes()


def test_a_fine_tune_does_not_get_anothers_norms(checkpoint: Path, cache: Any, tmp_path: Path) -> None:
    """Same config, same headers, other norms: the cached skeleton does not fit."""
    from safetensors.numpy import load_file, save_file

    tuned = tmp_path / "tuned"
    tuned.mkdir()
    for path in checkpoint.iterdir():
        (tuned / path.name).write_bytes(path.read_bytes())
    for shard in tuned.glob("*.safetensors"):
        tensors = load_file(shard)
        save_file({n: (t * 2 if n == "model.norm.weight" else t) for n, t in tensors.items()}, shard, {"format": "pt"})
    export(ExportOptions(model=str(tuned), output=tmp_path / "out", group_size=32))
    ids = np.arange(5)[None]
    wanted = logits(dequantized_ir(tmp_path / "out", tuned, tmp_path), ids)
    np.testing.assert_allclose(logits(tmp_path / "out" / "openvino_model.xml", ids), wanted, rtol=1e-3, atol=1e-4)


def test_an_edited_plan_is_obeyed(checkpoint: Path, cache: Any, tmp_path: Path) -> None:
    plan = json.loads(plan_model(ExportOptions(model=str(checkpoint), group_size=32)).to_json())
    chosen = plan["layers"][3]
    chosen["format"], chosen["group_size"] = "int8_sym", -1
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    result = export(ExportOptions(model=str(checkpoint), output=tmp_path / "out", plan=tmp_path / "plan.json"))
    formats = {layer["name"]: layer["format"] for layer in result.report["layers"]}
    assert formats[chosen["name"]] == "int8_sym"
    assert packed_types(tmp_path / "out" / "openvino_model.xml") == {"u4", "u8", "i8"}


def test_a_judged_export(checkpoint: Path, cache: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr("llmcomp.judging.evaluate", lambda *a, **k: given.extend(evaluate(*a, **k)) or given)
    export(ExportOptions(model=str(checkpoint), output=tmp_path / "out", group_size=32, eval=True))
    judged = json.loads((tmp_path / "out" / "report.json").read_text())["evaluation"]
    reference, scores = given
    assert reference.name == str(checkpoint) and judged["reference_perplexity"] == reference.perplexity
    assert judged["kl"] == scores.kl > 0 and judged["perplexity"] == scores.perplexity and (judged["windows"], judged["window"]) == (4, 256)
    assert f"KL {scores.kl:.5f}" in (tmp_path / "out" / "report.md").read_text()


def test_an_export_that_cannot_be_judged_is_kept(checkpoint: Path, cache: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise JudgeError("was memory short?")

    monkeypatch.setattr("llmcomp.export.judge", refuse)
    result = export(ExportOptions(model=str(checkpoint), output=tmp_path / "out", group_size=32, eval=True))
    assert result.report["evaluation"] is None and result.report["warnings"] == ["not judged: was memory short?"]
    assert (tmp_path / "out" / "openvino_model.xml").is_file()


def test_a_gguf_is_not_judged(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    with pytest.raises(OptionError, match=r"--eval: .*fp32"):
        export(ExportOptions(model=str(tmp_path / "m.gguf"), output=tmp_path / "out", eval=True))
    assert not (tmp_path / "out").exists()


def test_a_norm_that_is_not_finite_stops_the_export(tmp_path: Path, cache: Any) -> None:
    tensors = tiny_llama(tmp_path / "m")
    tensors["model.norm.weight"][7] = np.nan
    save_shards(tmp_path / "m", tensors)
    with pytest.raises(NonFiniteWeightError, match=r"model\.norm\.weight: 1 of 96 values .* index 7"):
        export(ExportOptions(model=str(tmp_path / "m"), output=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_weights_of_nothing_but_zeros_are_told(tmp_path: Path, cache: Any) -> None:
    tensors = tiny_llama(tmp_path / "m")
    # A row of zeros, as embeddings of padding have, is no reason to doubt.
    tensors["model.embed_tokens.weight"][0] = 0
    tensors["model.layers.1.mlp.up_proj.weight"][:] = 0
    save_shards(tmp_path / "m", tensors)
    report = export(ExportOptions(model=str(tmp_path / "m"), output=tmp_path / "out", no_tokenizer=True)).report
    told = [text for text in report["warnings"] if "zeros" in text]
    assert len(told) == 1 and told[0].startswith("1 weights") and "model.layers.1.mlp.up_proj.weight" in told[0]


@pytest.mark.parametrize(
    ("methods", "factor", "left"),
    [
        ({}, 1e-12, "nothing"),
        ({}, 1e-6, "too little"),
        ({"scale_estimation": True}, 1e-12, "nothing"),
        ({"scale_estimation": True}, 1e-20, "nothing"),
        ({"gptq": True, "awq": True}, 1e-30, "nothing"),
        ({"lora_correction": True}, 1e-9, "nothing"),
    ],
)
def test_a_layer_that_a_format_takes_to_zero_is_refused(
    cache: Any, tmp_path: Path, methods: dict[str, bool], factor: float, left: str
) -> None:
    """No scale is below 2^-23, NNCF's guard: weights far below it would be gone, and those about it coarse."""
    tensors = tiny_llama(tmp_path / "small")
    name = "model.layers.1.self_attn.v_proj.weight"
    tensors[name] = (tensors[name].astype(np.float32) * np.float32(factor)).astype(tensors[name].dtype)
    save_shards(tmp_path / "small", tensors)
    (tmp_path / "text.txt").write_text("the rain in the land went on and on. " * 40)
    data = {"dataset": str(tmp_path / "text.txt"), "sequence_length": 32, **methods} if methods else {}
    with pytest.raises(PrecisionError, match=rf"v_proj: int4_asym keeps {left} of it .*--override 'model.layers.1.self_attn.v_proj=keep'"):
        export(ExportOptions(model=str(tmp_path / "small"), output=tmp_path / "out", no_tokenizer=not methods, **data))
    assert not (tmp_path / "out").exists()
    if methods:
        return
    kept = ExportOptions(
        model=str(tmp_path / "small"), output=tmp_path / "kept", no_tokenizer=True, override=["model.layers.1.self_attn.v_proj=keep"]
    )
    assert not export(kept).report["warnings"]
