"""Prompts with completions: their tokens, where the completion begins, and data that is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from llmcomp import checkpoint as checkpoints
from llmcomp.calibration import Columns, read_pairs
from llmcomp.calibration.pairs import Pair
from llmcomp.errors import CalibrationError
from llmcomp.options import ExportOptions
from tests.calibration.helpers import ids
from tests.tiny import tiny_llama

END = 0
"""Of the tiny model's config.json."""
PAIRS = [("the rain", " in the land"), ("on and", " on"), ("", "the other day")]


def read(folder: Path, records: Any, columns: Columns | None = None, length: int = 64, tokens: int = 10**6, more: int = 0) -> list[Pair]:
    model = folder / "m"
    if not model.exists():
        tiny_llama(model)
    path = records if isinstance(records, Path) else folder / "pairs.jsonl"
    if not isinstance(records, Path):
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    opened = checkpoints.open(str(model))
    return read_pairs(ExportOptions(model=str(model)), opened, str(path), columns or Columns(), length, tokens, more)


def records(prompt: str = "prompt", completion: str = "completion") -> list[dict[str, str]]:
    return [{"id": "x", prompt: p, completion: c} for p, c in PAIRS]


def expected(folder: Path) -> list[tuple[list[int], int]]:
    return [(ids(folder, p) + ids(folder, c) + [END], len(ids(folder, p)) if p else 0) for p, c in PAIRS]


def told(found: list[Pair]) -> list[tuple[list[int], int]]:
    assert all(row.dtype == np.int64 for row, _ in found)
    return [(row.tolist(), begins) for row, begins in found]


def test_a_jsonl_and_a_parquet_are_read_alike_by_any_names(tmp_path: Path) -> None:
    assert told(read(tmp_path, records())) == expected(tmp_path)
    assert told(read(tmp_path, records("q", "a"), Columns("q", "a"))) == expected(tmp_path)
    path = tmp_path / "pairs.parquet"
    parquet.write_table(pa.table({"a": [c for _, c in PAIRS], "n": [1, 2, 3], "q": [p for p, _ in PAIRS]}), path)
    assert told(read(tmp_path, path, Columns("q", "a"))) == expected(tmp_path)


def test_a_beginning_and_ends_are_the_tokenizers_and_the_models(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    (plain, begins), *_ = told(read(tmp_path, records()[:1]))
    tokenizer = Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    (word,) = tokenizer.encode("<|user|>").ids
    tokenizer.post_processor = TemplateProcessing(single="<|user|> $A", special_tokens=[("<|user|>", word)])
    tokenizer.save(str(tmp_path / "m" / "tokenizer.json"))
    assert told(read(tmp_path, records()[:1])) == [([word, *plain], begins + 1)]
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    for end, appended in (([7, 0], [7]), (None, []), (plain[-2], [])):
        # A completion that ends so already is not ended twice.
        (tmp_path / "m" / "config.json").write_text(json.dumps({**config, "eos_token_id": end}))
        assert told(read(tmp_path, records()[:1])) == [([word, *plain[:-1], *appended], begins + 1)]


def test_the_chat_template_is_asked_for(tmp_path: Path) -> None:
    row, begins = read(tmp_path, records(), Columns(chat=True))[0]
    asked = "<|user|>the rain<|end|><|assistant|>"
    assert (row.tolist(), begins) == (ids(tmp_path, asked) + ids(tmp_path, " in the land<|end|>"), len(ids(tmp_path, asked)))


def test_it_stops_when_there_is_enough_and_takes_no_pair_twice(tmp_path: Path) -> None:
    many = [{"prompt": f"day {n % 40}", "completion": f" rain {n % 40}"} for n in range(80)]
    assert len(read(tmp_path, many)) == 40
    lengths = [len(row) for row, _ in read(tmp_path, many)]
    found = read(tmp_path, many, tokens=sum(lengths[:5]) - 1, more=3)
    assert [len(row) for row, _ in found] == lengths[:8]
    # What comes behind is not even read.
    assert len(read(tmp_path, [*many[:9], {"no": "columns"}], tokens=sum(lengths[:5]) - 1, more=3)) == 8


def test_a_completion_is_cut_where_the_row_ends(tmp_path: Path) -> None:
    whole = expected(tmp_path)[0]
    found = read(tmp_path, records()[:1], length=whole[1] + 1)
    assert told(found) == [(whole[0][: whole[1] + 1], whole[1])]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([{"prompt": "a", "text": "b"}], r"line 1: no column 'completion' among prompt, text\. Name it with --completion-column"),
        ([{"text": "b", "completion": "a"}], r"line 1: no column 'prompt' among text, completion\. Name it with --prompt-column"),
        ([*records(), {"prompt": "a", "completion": " \n"}], "line 4: its completion, column 'completion', is empty"),
        ([{"prompt": "a", "completion": None}], "column 'completion' is no text, but of type NoneType"),
        ([{"prompt": ["a"], "completion": "b"}], "column 'prompt' is no text, but of type list"),
        ([{"prompt": "the rain " * 60, "completion": " on"}], r"line 1: its prompt has \d+ tokens, so that its completion lies behind the 64 of a row"),
        ([{"prompt": "", "completion": "a"}], "no token of its completion follows another"),
    ],
)  # fmt: skip
def test_what_is_no_pair_is_refused(tmp_path: Path, given: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(CalibrationError, match=said):
        read(tmp_path, given)


def test_a_text_file_has_no_columns(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    with pytest.raises(CalibrationError, match=r"a\.txt: a \.txt has no columns"):
        read(tmp_path, tmp_path / "a.txt")
