from __future__ import annotations

from pathlib import Path

import pytest

from llmcomp.judge.tokens import tokenize
from tests.tiny import tiny_tokenizer


@pytest.mark.parametrize("text", ["one", " two\n\nthree\u3000vier \u20ac\U0001f600 f", "\t", "", "the rain in the land"])
def test_every_word_is_counted_once(tmp_path: Path, text: str) -> None:
    tiny_tokenizer(tmp_path)
    assert tokenize(str(tmp_path), text).words.sum() == len(text.split())
