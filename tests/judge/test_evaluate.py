"""The judge on hand-made IRs: with ids as the only input, with state, with a cache as input."""

from __future__ import annotations

import ast
import json
import math
import subprocess
import sys
import tempfile
import types
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from llmcomp.cli import main
from llmcomp.judge import JudgeError, evaluate, load_text
from llmcomp.judge.tokens import _other, _words, tokenize
from tests.judge.irs import TEXT, bigram, counting, table, vision, with_past
from tests.judge.llama import llama, log_probabilities
from tests.tiny import save_shards, tiny_config, tiny_llama


class FakeRows(dict[str, list[str]]):
    @property
    def column_names(self) -> list[str]:
        return list(self)


def tokens(folder: str) -> np.ndarray:
    return np.array(Tokenizer.from_file(str(Path(folder, "tokenizer.json"))).encode(TEXT.content).ids)


def begins_a_word(folder: str) -> list[bool]:
    """Byte-level tokens spell the text back: a token that holds the first letter after a space (or of the text)."""
    tokenizer = Tokenizer.from_file(str(Path(folder, "tokenizer.json")))
    begins, before = [], " "
    for i in tokens(folder):
        piece = tokenizer.decode([int(i)])
        spelled = before + piece
        begins.append(any(a == " " and b != " " for a, b in pairwise(spelled)))
        before = spelled[-1]
    return begins


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
    words = sum(begins_a_word(candidate)[t] for t in targets)
    kl = np.array([(np.exp(logp[ids[t]]) * (logp[ids[t]] - logq[ids[t]])).sum() for t in positions])
    # f32 sums of 320 terms against float64.
    assert scores.perplexity == pytest.approx(math.exp(nll), rel=1e-5)
    assert scores.word_perplexity == pytest.approx(math.exp(nll * len(targets) / words), rel=1e-4)
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
    for stride in (0, 17):
        with pytest.raises(JudgeError, match="stride"):
            evaluate([folder], TEXT, window=16, stride=stride)
    with pytest.raises(JudgeError, match="0 windows"):
        evaluate([folder], TEXT, window=16, limit=0)
    with pytest.raises(JudgeError, match="vocabularies differ"):
        small = bigram(tmp_path / "small", table(0)[:, :300])
        evaluate([folder], TEXT, small, window=16)
    with pytest.raises(JudgeError, match="no such folder"):
        evaluate([folder], TEXT, tokenizer=str(tmp_path / "nowhere"), window=16)


def test_state_starts_anew_in_every_window(tmp_path: Path) -> None:
    plain, folder = bigram(tmp_path / "plain", table(0)), counting(tmp_path / "state", table(0))
    _, scores = evaluate([folder], TEXT, plain, window=16, limit=3)
    assert scores.kl == 0 and scores.top1 == 1


def test_a_cache_as_input_is_left_empty(tmp_path: Path) -> None:
    plain, folder = bigram(tmp_path / "plain", table(0)), with_past(tmp_path / "past", table(0))
    _, scores = evaluate([folder], TEXT, plain, window=16, limit=2)
    assert scores.kl == 0


def test_candidates_do_not_meet(tmp_path: Path) -> None:
    """Several at once get what each gets alone."""
    reference = bigram(tmp_path / "p", table(0))
    folders = [bigram(tmp_path / name, table(seed)) for seed, name in enumerate("abc", 1)]
    together = evaluate(folders, TEXT, reference, window=16)[1:]
    alone = [evaluate([folder], TEXT, reference, window=16)[1] for folder in folders]
    assert [replace(s, seconds=0) for s in together] == [replace(s, seconds=0) for s in alone]
    assert len({s.kl for s in alone}) == 3


def test_what_is_no_language_model(tmp_path: Path) -> None:
    with pytest.raises(JudgeError, match="pixels"):
        evaluate([vision(tmp_path / "v")], TEXT, window=16)
    folder = Path(bigram(tmp_path / "m", table(0)))
    (folder / "openvino_model.xml").write_text("<net")
    with pytest.raises(JudgeError, match="cannot load"):
        evaluate([str(folder)], TEXT, window=16)
    (folder / "openvino_model.bin").unlink()
    with pytest.raises(JudgeError, match=r"no openvino_model\.bin"):
        evaluate([str(folder)], TEXT, window=16)


def test_the_tokenizer_of_whoever_has_one(tmp_path: Path) -> None:
    reference, folder = bigram(tmp_path / "p", table(0)), bigram(tmp_path / "q", table(1))
    wanted = evaluate([folder], TEXT, reference, window=16)[1].perplexity
    for file in Path(folder).glob("tokenizer*"):
        file.unlink()
    assert evaluate([folder], TEXT, reference, window=16)[1].perplexity == wanted
    with pytest.raises(JudgeError, match=r"no tokenizer there.*--tokenizer"):
        evaluate([folder], TEXT, window=16)
    (Path(folder) / "tokenizer.json").write_text("{}")
    with pytest.raises(JudgeError, match="its tokenizer cannot be loaded"):
        evaluate([folder], TEXT, window=16)


def test_a_tokenizer_that_cuts_or_pads_gives_the_whole_text(tmp_path: Path) -> None:
    folder = bigram(tmp_path / "m", table(0))
    whole = tokenize(folder, TEXT.content)
    path = Path(folder, "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=4096)
    tokenizer.save(str(path))
    assert np.array_equal(tokenize(folder, TEXT.content).ids, whole.ids) and whole.words.sum() == len(TEXT.content.split())


def test_a_folder_without_tokenizer_json_goes_through_transformers(tmp_path: Path) -> None:
    folder = bigram(tmp_path / "m", table(0))
    own, (ids, offsets) = tokenize(folder, TEXT.content), _other(folder, False)(TEXT.content)
    assert np.array_equal(own.ids, ids) and np.array_equal(own.words, _words(TEXT.content, len(ids), offsets))


def test_a_float_reference_in_a_child(tmp_path: Path) -> None:
    """Its perplexity is that of a numpy llama in float64."""
    tensors = tiny_llama(tmp_path / "hf", torch_dtype="float32")
    candidate = bigram(tmp_path / "q", table(1))
    told: list[str] = []
    base, scores = evaluate([candidate], TEXT, str(tmp_path / "hf"), window=32, limit=3, tell=told.append)
    ids = tokens(candidate)[: 3 * 32].reshape(3, 32)
    nll, kl = [], []
    logq = log_probabilities(table(1).astype(np.float64))
    for row in ids:
        logp = log_probabilities(llama(tiny_config(), {n: t.astype(np.float64) for n, t in tensors.items()}, row))
        nll += [-logp[t - 1, row[t]] for t in range(1, 32)]
        kl += [(np.exp(logp[t]) * (logp[t] - logq[row[t]])).sum() for t in range(32)]
    # torch in f32 against float64, two layers.
    assert base.perplexity == pytest.approx(math.exp(np.mean(nll)), rel=1e-5) and base.bin_bytes is None
    assert scores.kl == pytest.approx(np.mean(kl), rel=1e-4)
    assert any("temporary file" in line for line in told)


def test_a_float_reference_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = bigram(tmp_path / "q", table(1))
    tensors = tiny_llama(tmp_path / "hf", torch_dtype="float32")
    del tensors["model.norm.weight"]
    save_shards(tmp_path / "hf", tensors)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    with pytest.raises(JudgeError, match=r"1 tensors are missing.*model\.norm\.weight"):
        evaluate([candidate], TEXT, str(tmp_path / "hf"), window=16)
    assert not list((tmp_path / "scratch").iterdir())


def test_text() -> None:
    assert len(load_text().content) > 100_000
    with pytest.raises(JudgeError, match="no such file"):
        load_text("nowhere.txt")


def test_a_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's part is played by a stand-in, the hub by an answer."""
    asked: list[Any] = []

    def load_dataset(name: str, config: str | None, split: str) -> Any:
        asked.append((name, config, split))
        if name == "a/absent":
            raise FileNotFoundError("it is not here")
        return FakeRows({"text": ["one", "two"], "other": ["x", "y"]})

    stand_in = types.SimpleNamespace(load_dataset=load_dataset, config=types.SimpleNamespace(HF_HUB_OFFLINE=False))
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    monkeypatch.setattr("llmcomp.judge.text.trouble", lambda: None)
    assert load_text(dataset="a/b").content == "one\n\ntwo"
    assert load_text(dataset="a/b:train", config="c", column="other").content == "x\n\ny"
    assert asked == [("a/b", None, "test"), ("a/b", "c", "train")]
    with pytest.raises(JudgeError, match=r"absent.*it is not here.*--text"):
        load_text(dataset="a/absent")
    with pytest.raises(JudgeError, match=r"'nope' among text, other"):
        load_text(dataset="a/b", column="nope")
    monkeypatch.setattr("llmcomp.judge.text.trouble", lambda: "the hub cannot be reached (for a test)")
    with pytest.raises(JudgeError, match=r"for a test.*not in the cache"):
        load_text(dataset="a/absent")
    # What is in the cache works without the hub.
    assert load_text(dataset="a/b").content == "one\n\ntwo"


def test_an_offline_hub_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = bigram(tmp_path / "m", table(0))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("no process is needed to know this"))
    with pytest.raises(JudgeError, match="HF_HUB_OFFLINE"):
        evaluate([folder], TEXT, "no-such-owner/no-such-model", window=16)
    with pytest.raises(JudgeError, match="HF_HUB_OFFLINE"):
        evaluate([folder], TEXT, tokenizer="no-such-owner/no-such-model", window=16)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference, folder = bigram(tmp_path / "p", table(0)), bigram(tmp_path / "q", table(1))
    scores = tmp_path / "scores.json"
    assert main(["eval", folder, "--reference", reference, "--window", "16", "--windows", "3", "--json", str(scores)]) == 0
    told = capsys.readouterr().out
    assert "top1=" in told and f"bin_bytes={Path(folder, 'openvino_model.bin').stat().st_size}" in told and "3 windows of 16 tokens" in told
    assert [s["name"] for s in json.loads(scores.read_text())["scores"]] == [reference, folder]
    assert main(["eval", str(tmp_path)]) == 8 and "openvino_model.xml" in capsys.readouterr().err
    assert main(["eval", folder, "--json", str(tmp_path / "nowhere" / "s.json")]) == 8 and "nowhere" in capsys.readouterr().err


def test_piped_output_is_a_line_per_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = bigram(tmp_path / ("[red]" + "long" * 50), table(0))
    scores = tmp_path / "scores.json"
    assert main(["eval", folder, "--window", "16", "--windows", "1", "--json", str(scores)]) == 0
    assert sum(folder in line for line in capsys.readouterr().out.splitlines()) == 1
    assert json.loads(scores.read_text())["scores"][0]["kl_standard_error"] is None


def test_the_judge_knows_nothing_else_of_llmcomp() -> None:
    code = "import sys, llmcomp.judge as j; print(sorted(m for m in sys.modules if m.startswith(('llmcomp', 'torch', 'transformers'))))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not [m for m in ast.literal_eval(loaded) if m != "llmcomp" and not m.startswith("llmcomp.judge")]
