"""--weight-format keep: the written model has the codes of the source, and stands for exactly what they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from llmcomp import checkpoint
from llmcomp.checkpoint.encodings.groups import Grouped
from llmcomp.errors import LlmcompError, NonFiniteWeightError, OptionError
from llmcomp.export import dry_run, export, plan_model
from llmcomp.graph.model import ModelGraph, flat_rows
from llmcomp.graph.skeleton import get_skeletons
from llmcomp.options import ExportOptions
from llmcomp.planning import Plan
from llmcomp.writing import stream
from tests.checkpoint.encodings import test_awq, test_bitsandbytes, test_export, test_gptq, test_modelopt
from tests.checkpoint.encodings.test_export import IDS, made
from tests.checkpoint.gguf_file import write_gguf
from tests.test_path import logits
from tests.tiny import tiny_llama
from tests.written import written_weights


def awq(name: str, weight: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    parts, values = test_awq.made(weight.shape[1], weight.shape[0], 32)
    return {part.replace(test_awq.X, name.removesuffix(".weight")): stored for part, stored in parts.items()}, values


def runs(name: str, weight: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    parts, values = test_bitsandbytes.made(*weight.shape, 64, True)
    return {part.replace(test_bitsandbytes.X, name): stored for part, stored in parts.items()}, values


def two_scales(name: str, weight: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    parts, values = test_modelopt.made(*weight.shape)
    return {part.replace(test_modelopt.X, name.removesuffix(".weight")): stored for part, stored in parts.items()}, values


def sorted_gptq(name: str, weight: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Layers that read the stream of hidden states are in the order of activations, the others are not."""
    out, width = weight.shape
    order = np.random.default_rng(0).permutation(np.arange(width) // 32) if width == 96 else None
    parts, values = test_gptq.made(4, width, out, 32, order=order, scale=np.float32)
    return {part.replace(test_gptq.X, name.removesuffix(".weight")): stored for part, stored in parts.items()}, values


KINDS: test_export.Kinds = {
    **test_export.KINDS,
    "awq": (awq, test_awq.SETTINGS),
    "bitsandbytes": (runs, test_bitsandbytes.FOUR),
    "nvfp4": (two_scales, test_modelopt.SETTINGS),
    "sorted gptq": (sorted_gptq, test_gptq.settings(desc_act=True)),
}
FORMATS = {
    "fp8": {("fp8_e4m3", -1), ("fp8_e4m3", 32)},
    "gptq": {("int4_asym", 32)},
    "compressed-tensors": {("int4_asym", 32)},
    "fp8 experts": {("fp8_e4m3", -1)},
    "mxfp4 experts": {("mxfp4", 32)},
    "awq": {("int4_asym", 32)},
    "nvfp4": {("nvfp4", 16)},
    "sorted gptq": {("int4_asym", 32)},
}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One skeleton cache for the module: each architecture is traced once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMCOMP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def exported(source: Path, out: Path, weight_format: str = "keep", **options: Any) -> dict[str, Any]:
    if "plan" not in options:
        options["weight_format"] = weight_format
    export(ExportOptions(model=str(source), output=out, no_tokenizer=True, **options))
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report


def weights_of(source: Path) -> list[np.ndarray]:
    opened = checkpoint.open(source)
    graph = ModelGraph(get_skeletons(opened)[0], opened)
    return [np.asarray(graph.rows(layer, 0, flat_rows(layer)), np.float32).reshape(layer.shape) for layer in graph.layers]


def check_same(out: Path, report: dict[str, Any], source: Path, tmp_path: Path, rounding: float = 0.0) -> None:
    """The written model has the source's weights to the bit, or but for `rounding` of the largest, gives its logits, and is as large as planned."""
    wanted, found = weights_of(source), written_weights(out)
    assert len(wanted) == len(found) == len(report["layers"])
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        assert np.abs(ours - theirs).max() <= rounding * np.abs(theirs).max()
    exported(source, tmp_path / "float", "fp32", verify="none")
    ours, theirs = (logits(folder / "openvino_model.xml", IDS) for folder in (out, tmp_path / "float"))
    assert theirs.std() > 0.1
    # The runtime sums a group's products before it multiplies by the scale: some 160 roundings of 2^-24 in each of two blocks.
    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_is_what_is_stored(tmp_path: Path, kind: str) -> None:
    encoded, plain = made(tmp_path, kind, KINDS)
    out = tmp_path / "out"
    options = ExportOptions(model=str(encoded), output=out, weight_format="keep", no_tokenizer=True)
    forecast, plan = dry_run(options), plan_model(options)
    report = exported(encoded, out)
    check_same(out, report, plain, tmp_path)
    stored = [layer for layer in report["layers"] if layer["rule"] == "stored"]
    assert {(layer["format"], layer["group_size"]) for layer in stored} == FORMATS.get(kind, {(stored[0]["format"], 32)})
    assert all(layer["relative_error"] == 0 for layer in report["layers"]) and not report["folds"]
    assert forecast.bin_bytes == report["bytes"]["bin"] and plan.summary.bytes == report["bytes"]["weights"]
    method = json.loads((encoded / "config.json").read_text())["quantization_config"]["quant_method"]
    assert report["stored"] == {method: len(stored)}
    rest = [layer for layer in report["layers"] if layer not in stored]
    assert rest and all((layer["format"], layer["reason"]) == ("keep", "stored in float") for layer in rest)
    assert [entry.name for entry in plan.layers if entry.sorted] == [
        layer["name"] for layer in stored if kind == "sorted gptq" and layer["shape"][1] == 96
    ]
    assert f"The source stores {len(stored)} layers as {method}." in (out / "report.md").read_text()


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        pytest.param("Q4_0", "int4_sym", marks=pytest.mark.longest),
        pytest.param("Q8_0", "int8_sym", marks=pytest.mark.longest),
        ("Q5_1", "offset[8]"),
    ],
)
def test_a_gguf_file(tmp_path: Path, kind: str, wanted: str) -> None:
    source, out = tmp_path / "m.gguf", tmp_path / "out"
    write_gguf(source, gguf.GGMLQuantizationType[kind])
    report = exported(source, out)
    # A zero point that is no integer is a quotient rounded to f32.
    check_same(out, report, source, tmp_path, 3 * 2.0**-24 if wanted.startswith("offset") else 0.0)
    assert {(layer["format"], layer["group_size"]) for layer in report["layers"]} == {(wanted, 32)}
    assert report["stored"] == {f"gguf {kind}": 15}


def test_a_plan_is_edited_and_fed_back(tmp_path: Path) -> None:
    encoded, _ = made(tmp_path, "gptq", KINDS)
    plan = plan_model(ExportOptions(model=str(encoded), weight_format="keep", no_tokenizer=True))
    assert plan.folds == "none" and plan.main == "keep" and Plan.from_json(plan.to_json()) == plan
    file = tmp_path / "plan.json"
    edited = json.loads(plan.to_json())
    layers = {layer["name"].split(".", 2)[-1]: layer for layer in edited["layers"]}
    assert layers["0.mlp.up_proj"]["rule"] == "stored"
    layers["0.mlp.up_proj"]["format"] = "keep"
    layers["0.mlp.gate_proj"].update(format="int8_asym")
    layers["1.self_attn.q_proj"].update(format="int4_sym", rule="minmax")
    edited["folds"], edited["permutation"] = "equalize", "sorted"
    file.write_text(json.dumps(edited))
    report = exported(encoded, tmp_path / "out", plan=file)
    found = {layer["name"].split(".", 2)[-1]: layer for layer in report["layers"]}
    assert (found["0.mlp.up_proj"]["format"], found["0.mlp.up_proj"]["rule"]) == ("keep", "minmax")
    # Codes of four bits are also codes of eight.
    assert (found["0.mlp.gate_proj"]["format"], found["0.mlp.gate_proj"]["relative_error"]) == ("int8_asym", 0)
    assert found["1.self_attn.q_proj"]["relative_error"] > 1e-4
    moved = {name for line in report["folds"] for name in (line["from"], *line["into"])}
    assert not moved & {layer["name"] for layer in report["layers"] if layer["rule"] == "stored"} and not report["permuted"]

    def refused(name: str, words: str, **change: Any) -> None:
        again = json.loads(plan.to_json())
        next(layer for layer in again["layers"] if layer["name"].endswith(name)).update(change)
        file.write_text(json.dumps(again))
        with pytest.raises(OptionError, match=words):
            exported(encoded, tmp_path / "refused", plan=file)
        assert not (tmp_path / "refused").exists()

    refused("embed_tokens", "embed_tokens: rule stored: it is not stored quantized", format="int8_sym", rule="stored")
    refused("up_proj", "int4_sym group 32 does not hold its gptq codes .they fit int4_asym group 32", format="int4_sym")
    refused("up_proj", "int4_asym group 16 does not hold", group_size=16)
    refused("up_proj", "others look at data", rounding="gptq")
    refused("up_proj", "others look at data", adapter_rank=4)


def test_overrides_and_ignored_layers(tmp_path: Path) -> None:
    encoded, _ = made(tmp_path, "gptq", KINDS)
    options = {"override": ("*.v_proj=int8_sym", "*.0.mlp.up_proj=keep"), "ignored_scope": ["*.1.mlp.up_proj"]}
    plan = plan_model(ExportOptions(model=str(encoded), weight_format="keep", no_tokenizer=True, **options))
    found = {layer.name.removeprefix("model."): (layer.format, layer.rule) for layer in plan.layers}
    assert found["layers.0.self_attn.v_proj"] == ("int8_sym", "minmax")
    assert found["layers.0.mlp.up_proj"] == found["layers.1.mlp.up_proj"] == found["embed_tokens"] == ("keep", "minmax")
    assert found["layers.0.mlp.down_proj"] == ("int4_asym", "stored")


@pytest.mark.parametrize(
    "given",
    [
        {"awq": True, "dataset": "x"},
        {"gptq": True, "dataset": "x"},
        {"scale_estimation": True, "dataset": "x"},
        {"lora_correction": True, "dataset": "x"},
        {"gptq": True, "target_correction": True, "dataset": "x"},
        {"group_size": 64},
        {"ratio": 0.5},
        {"sym": True},
        {"all_layers": True},
        {"scale_rule": "search"},
        {"permutation": "sorted"},
        {"backup_precision": "int8_asym"},
        {"target_bpw": 4.5},
        {"target_size": "1GB"},
        {"max_loss": 0.1},
        {"codebook_scope": "blocks"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_what_contradicts_it_is_refused_by_name(given: dict[str, Any]) -> None:
    flag = "--" + next(iter(given)).replace("_", "-")
    with pytest.raises(OptionError, match=f"{flag}.*--weight-format keep"):
        # There is no such model: nothing is opened before.
        plan_model(ExportOptions(model="/nowhere", weight_format="keep", **given))


def test_a_float_checkpoint_has_no_codes_to_keep(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "m")
    with pytest.raises(OptionError, match=r"nothing in .* is stored quantized.*fp16"):
        exported(tmp_path / "m", tmp_path / "out")


def test_what_only_holds_codes_rounds_nothing() -> None:
    for given in ({"weight_format": "offset[4]"}, {"override": ("*.up_proj=offset[8]",)}):
        with pytest.raises(OptionError, match=r"rounds nothing.*--weight-format keep"):
            plan_model(ExportOptions(model="/nowhere", **given))
    with pytest.raises(OptionError, match="4 or 8 bits"):
        plan_model(ExportOptions(model="/nowhere", weight_format="offset[5]"))


def test_a_broken_off_export_goes_on_with_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded, _ = made(tmp_path, "fp8", KINDS)
    exported(encoded, tmp_path / "whole")
    seen = []

    def break_off(layer: Any, scheme: Any, error: float) -> None:
        seen.append(layer.name)
        if len(seen) == 6:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stream, "check_same", break_off)
        with pytest.raises(KeyboardInterrupt):
            exported(encoded, tmp_path / "out")
    exported(encoded, tmp_path / "out", resume=True)
    for name in ("openvino_model.bin", "openvino_model.xml"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_nan_among_codes_is_found(tmp_path: Path) -> None:
    encoded, _ = made(tmp_path, "fp8", KINDS)
    opened = checkpoint.open(encoded)
    info = opened.tensors["model.layers.1.mlp.up_proj.weight"]
    raw = bytearray(info.file.read_bytes())
    raw[info.begin + 7] = 0xFF
    info.file.write_bytes(raw)
    with pytest.raises(NonFiniteWeightError, match="up_proj"):
        exported(encoded, tmp_path / "out")


def test_codes_that_are_not_the_weight_are_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    encoded, _ = made(tmp_path, "gptq", KINDS)
    lines = Grouped.lines
    monkeypatch.setattr(
        Grouped, "lines", lambda self, *args: type(found := lines(self, *args))(found.codes, found.scale, found.zero_point ^ 1)
    )
    with pytest.raises(LlmcompError, match="not the weight that they are decoded to"):
        exported(encoded, tmp_path / "out")
