from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from llmcomp.judge import JudgeError, hub, load_text


def test_python_s_own_text_is_long_and_always_the_same() -> None:
    text = load_text()
    assert len(text.content) > 100_000 and text == load_text()


def test_files(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("grün\n", encoding="utf8")
    assert load_text(str(tmp_path / "t.txt")).content == "grün\n"
    (tmp_path / "t.txt").write_bytes(b"gr\xfcn")
    for file, words in (("nowhere.txt", "no such file"), ("t.txt", "UTF-8"), (".", "cannot be read")):
        with pytest.raises(JudgeError, match=words):
            load_text(str(tmp_path / file))


def test_a_data_set_from_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    data = tmp_path / "data"
    data.mkdir()
    for split in ("test", "train"):
        (data / f"{split}.jsonl").write_text("".join(json.dumps({"n": i, "text": f"{split} {i}"}) + "\n" for i in range(2)))
    assert load_text(dataset=str(data)).content == "test 0\n\ntest 1"
    assert load_text(dataset=f"{data}:train", column="n").content == "0\n\n1"
    with pytest.raises(JudgeError, match="no column 'm' among n, text"):
        load_text(dataset=str(data), column="m")
    with pytest.raises(JudgeError, match="split"):
        load_text(dataset=f"{data}:nothing")


def test_a_data_set_without_a_hub_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # A port of this machine at which nobody listens.
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    started = time.monotonic()
    with pytest.raises(JudgeError, match=r"nobody/nothing: the hub cannot be reached .* --text FILE"):
        load_text(dataset="nobody/nothing")
    # The import of the library included.
    assert time.monotonic() - started < 10


def test_a_hub_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(hub, "ASK_SECONDS", 0.1)
    hung = threading.Event()
    monkeypatch.setattr(hub, "_ask", lambda: hung.wait(20) and None)
    assert hub.trouble() == "the hub cannot be reached (no answer within 0.1 s)"
    hung.set()


def test_hub_ids() -> None:
    assert hub.is_hub_id("gpt2") and hub.is_hub_id("a-b/c.d_e")
    assert not any(hub.is_hub_id(s) for s in ("/a/b", "./a", "a/b/c", "a b", "", "C:\\m"))
