"""Low-rank corrections on the whole path: the written model is the compressed weights plus B A, in numpy; they never do harm; bytes are exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from llmcomp import adapting, formats
from llmcomp.errors import OptionError
from llmcomp.export import dry_run, plan_model
from llmcomp.options import ExportOptions
from llmcomp.planning import Plan, Scheme
from llmcomp.solving import Moments
from tests.test_calibrated import run, source
from tests.test_path import PROPERTIES, logits

__all__ = ["source"]
RANK = 4


def correct(scheme: Scheme, seed: int = 0, off: float = 1.0) -> tuple[np.ndarray, np.ndarray, adapting.Correction, Moments]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(300, 48)) * np.geomspace(1, 30, 48)
    w = rng.normal(size=(32, 48)).astype(np.float32)
    rounded = (w + off * 0.1 * rng.normal(size=w.shape)).astype(np.float32)
    moments = Moments((x.T @ x / len(x)).astype(np.float32))
    return w, rounded, adapting.correct(scheme, w, rounded, moments), moments


@pytest.mark.parametrize("stored", ["int8_asym", "fp16"])
def test_the_loss_is_that_of_what_is_stored(stored: str) -> None:
    w, rounded, found, moments = correct(Scheme("int4_sym", 16, adapter_rank=RANK, adapter_format=stored))
    power, before, after = (
        float(np.einsum("ij,jk,ik->", d.astype(np.float64), moments.hessian.astype(np.float64), d.astype(np.float64)))
        for d in (w, rounded - w, rounded + found.product - w)
    )
    assert found.helps and found.loss == pytest.approx(after / power, rel=1e-4) and after < 0.8 * before
    a, b = (x.astype(np.float32) if isinstance(x, np.ndarray) else x.stored().dequantize() for x in found.adapters)
    assert a.shape == (RANK, 48) and b.shape == (32, RANK)
    np.testing.assert_array_equal(b @ a, found.product)


def test_what_does_not_help_is_zeros() -> None:
    _, _, found, _ = correct(Scheme("int4_sym", 16, adapter_rank=RANK), off=0.0)
    assert not found.helps and found.loss == 0 and not found.product.any()
    assert all(isinstance(x, formats.CompressedWeight) and not x.stored().dequantize().any() for x in found.adapters)


@pytest.mark.parametrize(
    ("methods", "stored"), [({}, "int8_asym"), ({"awq": True}, "fp16"), ({"scale_estimation": True, "gptq": True}, "int8_asym")]
)
def test_the_written_model_is_the_weights_plus_the_correction(source: Path, tmp_path: Path, methods: dict[str, Any], stored: str) -> None:
    report = run(source, tmp_path / "out", lora_correction=True, lora_rank=RANK, lora_adapters=stored, **methods)
    told = [layer for layer in report["layers"] if layer["adapters"]]
    assert len(told) == 14 and "the whole model ran" in report["verified"]
    for layer in told:
        out, width = layer["shape"]
        rows = width * RANK + out * RANK
        extra = 2 * rows if stored == "fp16" else rows + 3 * (RANK + out)
        assert layer["bytes"] == out * width // 2 + 2 * out * (width // 32) + extra
        assert layer["calibration"]["loss"] < layer["calibration"]["rounded_loss"] <= layer["calibration"]["plain_loss"]
        assert layer["calibration"]["adapters"] == "kept"
    ids = np.random.default_rng(0).integers(3, 260, (1, 24))
    xml = tmp_path / "out" / "openvino_model.xml"
    # The same sums in f32, in another order.
    np.testing.assert_allclose(logits(xml, ids), logits(merged(xml, tmp_path), ids), rtol=1e-3, atol=1e-4)


def merged(xml: Path, scratch: Path) -> Path:
    """The written model with W + B A, computed in numpy, in place of each corrected layer."""
    model = ov.Core().read_model(xml)
    sums = [node for node in model.get_ordered_ops() if node.get_friendly_name().endswith("/corrected")]
    assert len(sums) == 14
    for node in sums:
        matmul, second = (node.input_value(i).get_node() for i in (0, 1))
        first = second.input_value(0).get_node()
        w, b, a = (value(one.input_value(1)) for one in (matmul, second, first))
        assert a.shape == (RANK, w.shape[1]) and b.shape == (w.shape[0], RANK)
        whole = ops.matmul(matmul.input_value(0), ops.constant(w + b @ a), False, True)
        assert first.input_value(0) == matmul.input_value(0)
        for target in node.output(0).get_target_inputs():
            target.replace_source_output(whole.output(0))
    ov.save_model(model, scratch / "merged.xml", compress_to_fp16=False)
    return scratch / "merged.xml"


def value(output: Any) -> np.ndarray:
    """What a decompression chain gives, in f32 as the plugins compute it."""
    node = output.get_node()
    inputs = [value(i) for i in node.input_values()[: 1 if node.get_type_name() in ("Convert", "Reshape") else 2]]
    match node.get_type_name():
        case "Constant":
            branch = ov.Model([ops.result(ops.convert(output, "f32"))], [], "constant")
            return ov.Core().compile_model(branch, "CPU", PROPERTIES)({})[0].copy()
        case "Convert":
            return inputs[0]
        case "Reshape":
            return inputs[0].reshape(list(node.get_output_shape(0)))
        case "Subtract":
            return inputs[0] - inputs[1]
        case "Multiply":
            return inputs[0] * inputs[1]
    raise AssertionError(node.get_type_name())


def test_optimum_runs_it(source: Path, tmp_path: Path) -> None:
    import torch
    from optimum.intel import OVModelForCausalLM

    run(source, tmp_path / "out", lora_correction=True)
    model = OVModelForCausalLM.from_pretrained(tmp_path / "out", ov_config=PROPERTIES)
    ids = np.arange(8)[None]
    out = model(input_ids=torch.from_numpy(ids), attention_mask=torch.ones(1, 8, dtype=torch.int64)).logits
    np.testing.assert_allclose(out.numpy(), logits(tmp_path / "out" / "openvino_model.xml", ids), rtol=1e-4, atol=1e-5)
    assert model.generate(input_ids=torch.from_numpy(ids), max_new_tokens=4, min_new_tokens=4).shape == (1, 12)


def test_a_last_layer_keeps_the_outputs_name(source: Path, tmp_path: Path) -> None:
    from tests.tiny import tiny_llama

    tiny_llama(tmp_path / "tiny", tie_word_embeddings=False)
    (tmp_path / "text.txt").write_text((source / "text.txt").read_text())
    report = run(tmp_path, tmp_path / "out", lora_correction=True, all_layers=True, override=["*embed_tokens=int8"])
    assert report["layers"][-1]["adapters"]
    model = ov.Core().read_model(tmp_path / "out" / "openvino_model.xml")
    assert model.output("logits").get_node().input_value(0).get_node().get_friendly_name().endswith("/corrected")


def test_plan_and_dry_run_know_the_bytes(source: Path, tmp_path: Path) -> None:
    asked = {"weight_format": "int4_sym", "group_size": 32, "lora_correction": True, "lora_rank": 1000}
    plan = plan_model(ExportOptions(model=str(source / "tiny"), **asked))
    ranks = {entry.adapter_rank for entry in plan.layers if entry.adapter_rank}
    assert ranks == {32, 96}, "no rank above the layer's own"
    assert any("14 layers have fewer rows or columns" in note for note in plan.notes)
    assert any("no smaller with their corrections than in fp16" in note for note in plan.notes)
    forecast = dry_run(ExportOptions(model=str(source / "tiny"), output=tmp_path / "out", no_tokenizer=True, **asked))
    report = run(source, tmp_path / "out", lora_correction=True, lora_rank=1000)
    assert report["bytes"]["bin"] == forecast.bin_bytes
    assert report["bytes"]["weights"] == plan.summary.bytes
    without, missed = plan.without_calibration(())
    bare = plan_model(ExportOptions(model=str(source / "tiny"), weight_format="int4_sym", group_size=32))
    assert len(missed) == 14 and without.summary.bytes == bare.summary.bytes


@pytest.mark.parametrize(
    ("change", "words"),
    [({"adapter_rank": 1000}, "between 0 and"), ({"adapter_rank": -1}, "between 0 and"), ({"adapter_format": "nf4"}, "adapter_format")],
)
def test_a_plan_that_makes_no_sense(source: Path, change: dict[str, Any], words: str) -> None:
    plan = plan_model(ExportOptions(model=str(source / "tiny"), weight_format="int4_sym", group_size=32, lora_correction=True))
    data = json.loads(plan.to_json())
    data["layers"][1] |= change
    from llmcomp import checkpoint as checkpoints
    from llmcomp.graph.model import ModelGraph
    from llmcomp.graph.skeleton import get_skeletons

    opened = checkpoints.open(str(source / "tiny"))
    layers = ModelGraph(get_skeletons(opened)[0], opened).layers
    with pytest.raises(OptionError, match=words):
        Plan.from_json(json.dumps(data)).check_against(layers)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lora_correction": True, "weight_format": "int8_sym"}, "too little"),
        ({"lora_rank": 4}, "--lora-rank"),
        ({"lora_adapters": "fp16", "awq": True}, "--lora-adapters"),
        ({"lora_correction": True, "lora_rank": 0}, "--lora-rank 0"),
    ],
)
def test_nonsense_is_refused_at_once(options: dict[str, Any], words: str) -> None:
    from llmcomp.planning import check_options

    with pytest.raises(OptionError, match=words):
        check_options(ExportOptions(model="m", **options))
