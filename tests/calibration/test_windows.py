from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from llmcomp.calibration import windows
from llmcomp.calibration.items import Text
from llmcomp.calibration.tokenizer import Tokenizer
from tests.calibration.helpers import STORY, ids, tokenizer_folder


def pieces(text: str, size: int, read: list[int]) -> Iterator[Text]:
    for start in range(0, len(text), size):
        read.append(start)
        yield Text(text[start : start + size], start == 0)


@pytest.mark.parametrize("size", [1, 7, 100, 5000])
@pytest.mark.parametrize("count", [1, 3, 40, 10_000])
def test_the_tokens_are_those_of_the_whole_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, count: int) -> None:
    monkeypatch.setattr(windows, "LOOKAHEAD", 8)
    monkeypatch.setattr(windows, "CHARACTERS", 1)
    encode = Tokenizer(tokenizer_folder(tmp_path)).encode
    got = windows.cut(pieces(STORY, size, []), encode, count, 9)
    wanted = ids(tmp_path, STORY)[: count * 9]
    assert np.concatenate(got).tolist() == wanted and all(len(row) == 9 for row in got[:-1])


def test_no_more_is_read_and_tokenized_than_needed(tmp_path: Path) -> None:
    tokenizer = Tokenizer(tokenizer_folder(tmp_path))
    read: list[int] = []
    seen: list[int] = []

    def encode(text: str) -> np.ndarray:
        seen.append(len(text))
        return tokenizer.encode(text)

    assert len(windows.cut(pieces(STORY * 100, 1000, read), encode, 4, 16)) == 4
    assert len(read) * 1000 < 12_000 and sum(seen) < 12_000
    # One document larger than all that is needed.
    seen.clear()
    assert len(windows.cut([Text(STORY * 100)], encode, 4, 16)) == 4
    assert sum(seen) < 12_000
