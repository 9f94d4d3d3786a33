from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmcomp.calibration.tokenizer import Tokenizer
from llmcomp.errors import TokenizerError
from tests.calibration.helpers import ids, tokenizer_folder


def test_older_files_become_a_tokenizer_json(tmp_path: Path) -> None:
    """GPT-2's pair of files, with the vocabulary of the tokenizer.json."""
    folder = tokenizer_folder(tmp_path)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    old = tmp_path / "old"
    old.mkdir()
    (old / "vocab.json").write_text(json.dumps(model["vocab"]))
    (old / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"]))
    (old / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", "unk_token": "<|end|>"}))
    text = "the other rain in the land"
    assert Tokenizer(old).encode(text).tolist() == ids(tmp_path, text)
    assert sorted(p.name for p in old.iterdir()) == ["merges.txt", "tokenizer_config.json", "vocab.json"]


def test_limits_of_its_training_do_not_hold(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path)
    wanted = ids(tmp_path, "the rain in the land")
    data = json.loads((folder / "tokenizer.json").read_text())
    data["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    data["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(data))
    assert Tokenizer(folder).encode("the rain in the land").tolist() == wanted


def test_ordinary_tokens_are_those_that_are_not_special(tmp_path: Path) -> None:
    assert Tokenizer(tokenizer_folder(tmp_path)).ordinary().tolist() == list(range(3, 3 + 256 + 6))


def test_no_tokenizer_and_a_broken_one(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="its tokenizer cannot be loaded"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer.json: it cannot be read"):
        Tokenizer(tmp_path)
