"""The judge on a hand-made IR, stateless and with ids as its only input."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from llmcomp.cli import main
from llmcomp.judge import JudgeError, Text, evaluate, load_text
from tests.tiny import tiny_tokenizer

VOCABULARY = 320
TEXT = Text("text", "the rain in the land then rose on another hill. " * 12)


def table(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32)


def bigram(folder: Path, logits: np.ndarray) -> str:
    """A model whose logits are a row of a table: the next token given this one."""
    folder.mkdir(parents=True)
    ids = ops.parameter([-1, -1], ov.Type.i64, name="input_ids")
    ids.output(0).set_names({"input_ids"})
    out = ops.gather(ops.constant(logits), ids, ops.constant(0))
    ov.save_model(ov.Model([ops.result(out)], [ids]), folder / "openvino_model.xml", compress_to_fp16=False)
    tiny_tokenizer(folder, VOCABULARY)
    return str(folder)


def tokens(folder: str) -> np.ndarray:
    from tokenizers import Tokenizer

    return np.array(Tokenizer.from_file(str(Path(folder, "tokenizer.json"))).encode(TEXT.content).ids)


@pytest.mark.parametrize("stride", [16, 5])
def test_scores_are_the_definitions(tmp_path: Path, stride: int) -> None:
    p, q = table(0), table(1)
    reference, candidate = bigram(tmp_path / "p", p), bigram(tmp_path / "q", q)
    ids = tokens(candidate)
    base, scores = evaluate([candidate], TEXT, reference, window=16, stride=stride)
    logp, logq = (np.log(np.exp(z.astype(np.float64)) / np.exp(z.astype(np.float64)).sum(-1, keepdims=True)) for z in (p, q))
    starts = range(0, len(ids) - 15, stride)
    targets = [t for s in starts for t in range(s + (1 if s == 0 or stride == 16 else 16 - stride), s + 16)]
    positions = [t for s in starts for t in range(s + (0 if s == 0 else 16 - stride), s + 16)]
    nll = np.mean([-logq[ids[t - 1], ids[t]] for t in targets])
    kl = np.array([(np.exp(logp[ids[t]]) * (logp[ids[t]] - logq[ids[t]])).sum() for t in positions])
    # f32 sums of 320 terms against float64.
    assert scores.perplexity == pytest.approx(math.exp(nll), rel=1e-5)
    assert scores.word_perplexity == pytest.approx(math.exp(nll * len(ids) / len(TEXT.content.split())), rel=1e-4)
    if stride == 16:
        assert scores.kl == pytest.approx(kl.mean(), rel=1e-5)
    assert scores.kl_percentiles is not None and scores.kl_percentiles["50"] == pytest.approx(np.median(kl), rel=1e-5)
    agreed = np.mean([logp[ids[t]].argmax() == logq[ids[t]].argmax() for t in positions])
    assert scores.top1 == pytest.approx(agreed)
    assert base.perplexity == pytest.approx(math.exp(np.mean([-logp[ids[t - 1], ids[t]] for t in targets])), rel=1e-5)
    assert base.kl is None and scores.windows == len(starts)


def test_a_model_against_itself(tmp_path: Path) -> None:
    folder = bigram(tmp_path / "p", table(0))
    _, scores = evaluate([folder], TEXT, folder, window=16)
    assert scores.kl == 0 and scores.kl_standard_error == 0 and scores.top1 == 1


def test_what_cannot_be_judged(tmp_path: Path) -> None:
    folder = bigram(tmp_path / "p", table(0))
    broken = table(0)
    broken[5, 3] = np.nan
    with pytest.raises(JudgeError, match="NaN or Inf"):
        evaluate([bigram(tmp_path / "nan", np.where(np.isfinite(broken), np.inf, broken))], TEXT, window=16)
    with pytest.raises(JudgeError, match=r"\d+ tokens"):
        evaluate([folder], TEXT, window=10_000)
    with pytest.raises(JudgeError, match=r"windows of 16"):
        evaluate([folder], TEXT, window=16, limit=10_000)
    with pytest.raises(JudgeError, match=r"no openvino_model\.xml"):
        evaluate([str(tmp_path)], TEXT, tokenizer=folder)
    with pytest.raises(JudgeError, match="neither an OpenVINO nor"):
        evaluate([folder], TEXT, str(tmp_path), window=16)
    with pytest.raises(JudgeError, match="stride"):
        evaluate([folder], TEXT, window=16, stride=17)
    with pytest.raises(JudgeError, match="vocabularies differ"):
        small = bigram(tmp_path / "small", table(0)[:, :300])
        evaluate([folder], TEXT, small, window=16)
    with pytest.raises(JudgeError, match="no tokenizer"):
        evaluate([folder], TEXT, tokenizer=str(tmp_path / "nowhere"))


def test_text() -> None:
    assert len(load_text().content) > 100_000
    with pytest.raises(JudgeError, match="no such file"):
        load_text("nowhere.txt")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference, folder = bigram(tmp_path / "p", table(0)), bigram(tmp_path / "q", table(1))
    scores = tmp_path / "scores.json"
    assert main(["eval", folder, "--reference", reference, "--window", "16", "--windows", "3", "--json", str(scores)]) == 0
    told = capsys.readouterr().out
    assert "top-1" in told and "3 windows of 16 tokens" in told
    assert [s["name"] for s in json.loads(scores.read_text())["scores"]] == [reference, folder]
    assert main(["eval", str(tmp_path)]) == 8 and "openvino_model.xml" in capsys.readouterr().err
