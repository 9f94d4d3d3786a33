"""A compressed model as the start of training: the torch model computes what the IR does, and what training leaves is exported as it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from llmcomp import checkpoint as checkpoints
from llmcomp.errors import OptionError
from llmcomp.export import export
from llmcomp.options import ExportOptions
from llmcomp.options.modes import StripFormat
from llmcomp.starting import begun_of
from llmcomp.training.adapters import load_adapters, save_adapters
from llmcomp.training.folder import write_checkpoint
from llmcomp.training.loading import load_model
from llmcomp.training.quantized import quantized_weights
from llmcomp.training.start import Begun, begin
from llmcomp.training.strip import strip
from tests.calibration.architectures import save
from tests.test_path import logits
from tests.tiny import tiny_llama

IDS = np.arange(1, 18)[None]
CLOSE = 1e-3
"""Relative to the largest logit. The chains of an IR compute weights in f16, each of them 2^-11 off at most; the rest is f32 sums in another order."""


@pytest.fixture(autouse=True, scope="module")
def one_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMCOMP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def started(folder: Path, **options: Any) -> Begun:
    """Of folder/m, exported to folder/start."""
    found: list[Begun] = []
    group = {} if str(options.get("weight_format", "")).startswith("int8") else {"group_size": 32}
    export(
        ExportOptions(**{"model": str(folder / "m"), "output": folder / "start", "no_tokenizer": True, **group, **options}),
        observe=lambda graph, written, made: found.append(begun_of(graph, written, made)),
    )
    return found[0]


def student(folder: Path, begun: Begun, rank: int = 8) -> Any:
    opened = checkpoints.open(str(folder / "m"))
    model = load_model(opened)
    begin(model, begun, list(opened.tensors), rank)
    return model


def of_torch(model: Any) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(model(torch.from_numpy(IDS), use_cache=False).logits)


def train_a_little(model: Any) -> None:
    """Adapters, scales and norms somewhere else, as training leaves them."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, _, one in quantized_weights(model):
            one.lora_B.add_(torch.randn(one.lora_B.shape, generator=generator) * 0.02)
            one.gain.mul_(1 + 0.02 * torch.randn(one.gain.shape, generator=generator))
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.mul_(1.01)


def difference(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize(
    ("options", "tied"),
    [
        ({"weight_format": "int4_asym"}, True),
        pytest.param({"weight_format": "int4_sym", "scale_rule": "search", "all_layers": True}, False, marks=pytest.mark.longest),
        pytest.param({"weight_format": "int8_sym"}, False, marks=pytest.mark.longest),
        ({"weight_format": "int8_asym"}, True),
    ],
    ids=str,
)
def test_from_start_to_export(tmp_path: Path, options: dict[str, Any], tied: bool) -> None:
    """The first step is the start; trained, stripped in all ways and exported with its codes kept, the model stays the same."""
    tiny_llama(tmp_path / "m", tie_word_embeddings=tied)
    begun = started(tmp_path, **options)
    model = student(tmp_path, begun)
    first = of_torch(model)
    assert difference(first, logits(tmp_path / "start" / "openvino_model.xml", IDS)) < CLOSE
    train_a_little(model)
    trained = of_torch(model)
    assert difference(trained, first) > 10 * CLOSE

    (tmp_path / "t").mkdir()
    still = {n: w for n, w in begun.weights.items() if n not in {f"{name}.weight" for name, _, _ in quantized_weights(model)}}
    write_checkpoint(model, still, tmp_path / "t")
    export(ExportOptions(model=str(tmp_path / "t"), output=tmp_path / "ir", no_tokenizer=True, weight_format="keep"))
    kinds = {layer["format"] for layer in json.loads((tmp_path / "ir" / "report.json").read_text())["layers"]}
    assert kinds == {layer["format"] for layer in json.loads((tmp_path / "start" / "report.json").read_text())["layers"]}
    exported = logits(tmp_path / "ir" / "openvino_model.xml", IDS)
    save_adapters(model, tmp_path / "adapter", "m")
    for kind in StripFormat:
        again = student(tmp_path, begun)
        train_a_little(again)
        stripped = of_torch(strip(again, strip_format=kind))
        assert difference(stripped, trained) < CLOSE, kind
        assert difference(exported, stripped) < CLOSE, kind


@pytest.mark.parametrize("name", ["gpt2", *(pytest.param(name, marks=pytest.mark.longest) for name in ("gemma", "phi3", "opt"))])
def test_other_architectures_start_as_they_were_compressed(tmp_path: Path, name: str) -> None:
    """Weights that are stored turned around, merged ones, norms of one more than their weight, biases."""
    save(name, tmp_path / "m")
    begun = started(tmp_path, weight_format="int4_asym")
    model = student(tmp_path, begun, rank=4)
    wanted = logits(tmp_path / "start" / "openvino_model.xml", IDS)
    assert difference(of_torch(model), wanted) < CLOSE
    assert begun.columns


def test_a_start_is_read_as_it_was_saved(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "m")
    begun = started(tmp_path)
    begun.save(tmp_path / "begun.safetensors")
    again = Begun.load(tmp_path / "begun.safetensors")
    assert set(again.weights) == set(begun.weights)
    assert again.normed == begun.normed and begun.normed
    for name, weight in begun.weights.items():
        for part in ("codes", "scale", "zero_point"):
            np.testing.assert_array_equal(getattr(again.weights[name], part), getattr(weight, part))
    for kind in ("columns", "rows"):
        for name, values in getattr(begun, kind).items():
            np.testing.assert_array_equal(getattr(again, kind)[name], values)


def test_peft_reads_the_adapters(tmp_path: Path) -> None:
    """Its merged weights are W + B A of the float model that training began with."""
    from peft import PeftModel

    tiny_llama(tmp_path / "m")
    begun = started(tmp_path)
    model = student(tmp_path, begun, rank=4)
    train_a_little(model)
    save_adapters(model, tmp_path / "adapter", str(tmp_path / "m"))
    base = load_model(checkpoints.open(str(tmp_path / "m")))
    name, module, one = next(iter(quantized_weights(model)))
    before = base.get_submodule(name).weight.detach().clone()
    merged = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).merge_and_unload()
    added = (one.lora_B @ one.lora_A).detach()
    # PEFT adds in f32.
    torch.testing.assert_close(merged.get_submodule(name).weight.detach() - before, added, rtol=1e-4, atol=1e-6)
    assert module is not None and float(added.abs().max()) > 0


def test_adapters_of_another_model_are_refused(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "m")
    begun = started(tmp_path)
    model, other = student(tmp_path, begun, rank=4), student(tmp_path, begun, rank=6)
    save_adapters(model, tmp_path / "adapter", "m")
    with pytest.raises(OptionError, match="another model"):
        load_adapters(other, tmp_path / "adapter")
    again = student(tmp_path, begun, rank=4)
    train_a_little(model)
    save_adapters(model, tmp_path / "adapter", "m")
    load_adapters(again, tmp_path / "adapter")
    for (_, _, one), (_, _, two) in zip(quantized_weights(model), quantized_weights(again), strict=True):
        torch.testing.assert_close(one.lora_B, two.lora_B, rtol=0, atol=0)
    assert len(load_file(tmp_path / "adapter" / "adapter_model.safetensors")) == 2 * len(list(quantized_weights(model)))


def test_a_rank_that_a_layer_cannot_hold_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "m")
    begun = started(tmp_path)
    opened = checkpoints.open(str(tmp_path / "m"))
    model = load_model(opened)
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(OptionError, match=r"rank 4096 for model\.layers\.0"):
        begin(model, begun, list(opened.tensors), 4096)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, before[name], rtol=0, atol=0)


@pytest.mark.parametrize(
    "options",
    [{"weight_format": "nf4"}, {"lora_correction": True, "dataset": ["some text " * 600], "num_samples": 4, "sequence_length": 64}],
)
def test_what_is_not_trained_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    tiny_llama(tmp_path / "m")
    with pytest.raises(OptionError):
        started(tmp_path, **{"no_tokenizer": "dataset" not in options, **options})
    assert not (tmp_path / "start").exists()
