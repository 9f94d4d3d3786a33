"""Several folders on hand-made IRs: the same figures as one at a time, answers token by token, and errors before anything is compiled."""

from __future__ import annotations

import json
import sys
import weakref
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from llmcomp.judge import PROPERTIES, JudgeError, Settings, Text, evaluate, load_prompts, speed
from llmcomp.judge import compare as run
from llmcomp.judge.agreement import agreement
from llmcomp.judge.models import IRModel
from llmcomp.judge.tokens import stop_tokens, tokenize
from tests.judge.irs import TEXT, VOCABULARY, bigram, summing, table
from tests.judge.llama import llama
from tests.tiny import tiny_config, tiny_llama

SMALL = Settings(window=16, windows=3, prompts=("the rain", "then"), answer_tokens=5, prompt_tokens=8, speed_tokens=3, repeats=1)
MODULE = sys.modules[run.__module__]
"""The package's attribute of that name is the function."""


@pytest.mark.parametrize("kind", ["state", "past", "nothing"])
def test_token_by_token_is_all_at_once(tmp_path: Path, kind: str) -> None:
    logits, ids = table(0), [5, 7, 300]
    model = IRModel(Path(summing(tmp_path / kind, logits, kind)))
    wanted = list(ids)
    for _ in range(6):
        wanted.append(int(logits[sum(wanted) % VOCABULARY].argmax()))
    prompt = np.array(ids)
    # Twice, as nothing may be left of an earlier answer.
    assert model.greedy(prompt, 6, ()) == wanted[3:] and model.greedy(prompt, 6, ()) == wanted[3:]
    assert model.greedy(prompt, 6, {wanted[4]}) == wanted[3 : 4 + 1]
    np.testing.assert_array_equal(model.logits(prompt), logits[np.cumsum(ids) % VOCABULARY])


def test_the_figures_of_evaluate(tmp_path: Path) -> None:
    reference, first, second = (bigram(tmp_path / name, table(seed)) for seed, name in enumerate("pqr"))
    found = run([first, second], TEXT, reference, settings=SMALL)
    wanted = evaluate([first, second], TEXT, reference, window=16, limit=3)
    assert found.reference is not None
    got = [found.reference.scores, *(m.scores for m in found.models)]
    assert [replace(s, seconds=0) for s in got] == [replace(s, seconds=0) for s in wanted]
    a, b = (np.array(m.scores.window_kl) for m in found.models)
    assert found.models[0].kl_difference is None and found.models[1].kl_difference == pytest.approx((b - a).mean())
    assert found.models[1].kl_difference_standard_error == pytest.approx((b - a).std(ddof=1) / 3**0.5)
    assert found.reference.agreement is None and found.reference.speed is not None and found.reference.speed.first_token_ms > 0


def test_a_perplexity_s_error_is_the_loss_s(tmp_path: Path) -> None:
    folder = bigram(tmp_path / "m", table(0))
    ids = tokenize(folder, TEXT.content).ids[:48].reshape(3, 16)
    logp = table(0) - np.log(np.exp(table(0).astype(np.float64)).sum(-1, keepdims=True))
    losses = np.array([-logp[row[:-1], row[1:]].mean() for row in ids])
    scores = run([folder], TEXT, settings=SMALL).models[0].scores
    # f32 against float64; the error of exp(x) is exp(x) times that of x.
    assert scores.perplexity_standard_error == pytest.approx(np.exp(losses.mean()) * losses.std(ddof=1) / 3**0.5, rel=1e-4)
    assert run([folder], TEXT, settings=replace(SMALL, windows=1)).models[0].scores.perplexity_standard_error is None


def test_the_answers(tmp_path: Path) -> None:
    reference, other = table(0), table(1)
    # The same up to the second token of the first answer, and from then on not.
    base = bigram(tmp_path / "p", reference)
    ids = [tokenize(base, prompt).ids for prompt in SMALL.prompts]
    first = int(reference[ids[0][-1]].argmax())
    other[ids[0][-1]] = reference[ids[0][-1]]
    other[first] = np.roll(reference[first], 1)
    other[ids[1][-1]] = np.roll(reference[ids[1][-1]], 1)
    found = run([bigram(tmp_path / "q", other), base], TEXT, base, settings=SMALL)
    different, same = (m.agreement for m in found.models)
    assert different is not None and same is not None
    assert (different.first_divergent, different.first_divergent_share, different.identical) == (0.5, 0.1, 0)
    assert (same.first_divergent, same.first_divergent_share, same.identical, same.answers) == (5, 1, 2, 2)


def test_answers_and_speed_can_be_left_out(tmp_path: Path) -> None:
    folder = bigram(tmp_path / "p", table(0))
    (model,) = run([folder], TEXT, folder, settings=replace(SMALL, answer_tokens=0, repeats=0, prompt_tokens=10**6)).models
    assert model.agreement is None and model.speed is None and model.scores.kl == 0
    (model,) = run([folder], TEXT, settings=SMALL).models
    assert model.agreement is None and model.scores.kl is None and model.kl_difference is None


def test_one_model_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Any]] = []
    most = []
    inner = IRModel.__init__

    def counted(self: IRModel, *arguments: Any) -> None:
        alive.append(weakref.ref(self))
        most.append(sum(model() is not None for model in alive))
        inner(self, *arguments)

    monkeypatch.setattr(IRModel, "__init__", counted)
    folders = [bigram(tmp_path / name, table(seed)) for seed, name in enumerate("pqr")]
    run(folders[1:], TEXT, folders[0], settings=SMALL)
    # Each once for accuracy and once for speed.
    assert most == [1] * 6


def test_speed_is_the_runtime_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []
    inner = IRModel.__init__
    monkeypatch.setattr(
        IRModel, "__init__", lambda self, folder, properties=PROPERTIES: (used.append(properties), inner(self, folder, properties))[1]
    )
    clock = iter(x for ms in (9, 9, 9, 50, 1, 3, 70, 5, 5, 60, 2, 2) for x in (0, ms / 1000))
    monkeypatch.setattr(speed.time, "perf_counter", lambda: next(clock))
    found = speed.measure(Path(bigram(tmp_path / "m", table(0))), np.arange(4), 3, 3)
    # Warmed up by 9, 9, 9; then first tokens of 50, 70 and 60, later ones of 2, 5 and 2 on average.
    assert used == [{}] and found.first_token_ms == pytest.approx(60) and found.later_token_ms == pytest.approx(2)


def test_what_cannot_be_compared_is_told_before_anything_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, other = bigram(tmp_path / "p", table(0)), bigram(tmp_path / "q", table(1))
    small = bigram(tmp_path / "small", table(0)[:, :300])
    odd = bigram(tmp_path / "odd", table(0))
    tokenizer = Tokenizer.from_file(str(Path(odd, "tokenizer.json")))
    tokenizer.add_tokens([AddedToken("rain")])
    tokenizer.save(str(Path(odd, "tokenizer.json")))
    short = Text("short", "the rain")
    monkeypatch.setattr(MODULE, "IRModel", lambda *_: pytest.fail("compiled"))
    monkeypatch.setattr(MODULE, "open_reference", lambda *_: pytest.fail("compiled"))

    def refused(words: str, folders: list[str], *arguments: Any, settings: Settings = SMALL, text: Text = TEXT) -> None:
        with pytest.raises(JudgeError, match=words):
            run(folders, text, *arguments, settings=settings)

    refused(r"no openvino_model\.xml", [folder, str(tmp_path)])
    refused(r"nowhere: no such folder, and not a hub id", [folder], str(tmp_path / "nowhere"))
    refused("neither an OpenVINO nor", [folder], str(tmp_path))
    refused("small: the vocabularies differ: 300 tokens, and 320", [folder, small])
    refused("small: the vocabularies differ: 300 tokens, and 320", [folder], small)
    refused(r"odd: the vocabularies differ: its tokenizer.*--tokenizer", [folder, odd])
    refused("beyond its 200", [bigram(tmp_path / "smaller", table(0)[:, :200])])
    refused("short: it has .* tokens, and a window takes 16", [folder, other], text=short)
    refused("windows of 16", [folder], settings=replace(SMALL, windows=10**6))
    refused("the speed prompt takes", [folder], settings=replace(SMALL, prompt_tokens=10**6))
    refused("0 windows", [folder], settings=replace(SMALL, windows=0))
    refused("-1 repeats", [folder], settings=replace(SMALL, repeats=-1))
    refused("1 decoded", [folder], settings=replace(SMALL, speed_tokens=1))
    refused("makes no tokens", [folder], settings=replace(SMALL, prompts=("",)))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(MODULE.shutil, "disk_usage", lambda _: usage(9, 9, 0))
    refused("--windows", [other], folder)


def test_a_tokenizer_for_all(tmp_path: Path) -> None:
    folder, odd = bigram(tmp_path / "p", table(0)), bigram(tmp_path / "odd", table(1))
    Path(odd, "tokenizer.json").write_text("{}")
    assert run([folder, odd], TEXT, tokenizer=folder, settings=SMALL).tokenizer == folder


def test_a_float_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a child process: its answers are those of a numpy llama."""
    tensors = {n: t.astype(np.float64) for n, t in tiny_llama(tmp_path / "hf", torch_dtype="float32").items()}
    # Neither sampling nor a punishment of repetition is for us.
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps({"do_sample": True, "repetition_penalty": 9.0}))
    candidate = bigram(tmp_path / "q", table(1))
    wanted = []
    for prompt in SMALL.prompts:
        ids = tokenize(candidate, prompt).ids.tolist()
        for _ in range(SMALL.answer_tokens):
            ids.append(int(llama(tiny_config(), tensors, np.array(ids))[-1].argmax()))
        wanted.append(tuple(ids[-SMALL.answer_tokens :]))
    given: list[Any] = []
    monkeypatch.setattr(MODULE, "agreement", lambda reference, answers: given.append(reference) or agreement(reference, answers))
    found = run([candidate], TEXT, str(tmp_path / "hf"), settings=SMALL)
    assert given == [tuple(wanted)]
    assert found.reference is not None and found.reference.speed is None and found.reference.scores.bin_bytes is None
    assert found.models[0].scores.kl is not None and found.models[0].speed is not None


def test_what_ends_an_answer(tmp_path: Path) -> None:
    for name, files in {
        "a": {"config.json": "{"},
        "b": {"config.json": '{"eos_token_id": 3}', "generation_config.json": '{"eos_token_id": [2, 5]}'},
    }.items():
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / file).write_text(content)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert stop_tokens(["owner/hub", a, b]) == {2, 5} and stop_tokens([a]) == set()


def test_prompts_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one\n\n two \n", encoding="utf8")
    assert load_prompts(str(tmp_path / "p.txt")) == ("one", "two")
    (tmp_path / "p.txt").write_text("\n")
    for file, words in (("p.txt", "holds none"), ("nowhere", "cannot be read")):
        with pytest.raises(JudgeError, match=words):
            load_prompts(str(tmp_path / file))
