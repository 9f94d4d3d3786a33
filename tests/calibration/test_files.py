from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from llmcomp.calibration import files
from llmcomp.errors import CalibrationError, OptionError
from tests.calibration.helpers import STORY, ids, load, rows, windows

CHAT = [{"role": "user", "content": "the rain?"}, {"role": "assistant", "content": "on the land"}]
CHAT_TEXT = "<|user|>the rain?<|end|><|assistant|>on the land<|end|>"


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def jsonl(path: Path, *records: Any) -> Path:
    return write(path, "".join(json.dumps(record) + "\n" for record in records))


def table(path: Path, **columns: list[Any]) -> Path:
    parquet.write_table(pa.table(columns), path)
    return path


def refused(words: str, tmp_path: Path, dataset: Any, kind: type[Exception] = CalibrationError, **options: Any) -> None:
    with pytest.raises(kind, match=words):
        load(tmp_path, dataset, **options)


def test_a_text_gives_its_first_windows(tmp_path: Path) -> None:
    samples = load(tmp_path, write(tmp_path / "calibration.txt", STORY), 32, 50)
    assert rows(samples) == windows(ids(tmp_path, STORY), 32, 50)
    assert str(samples) == "32 samples of 50 tokens: the first disjoint windows of calibration.txt"
    assert (samples.source, samples.count, samples.tokens, samples.warnings) == ("calibration.txt", 32, 1600, ())


def test_the_last_window_is_shorter_and_counts(tmp_path: Path) -> None:
    text = STORY[:100]
    tokens = ids(tmp_path, text)
    samples = load(tmp_path, write(tmp_path / "short.txt", text), 128)
    assert [t for row in rows(samples) for t in row] == tokens and [len(r) for r in samples.rows] == [16] * (len(tokens) // 16) + [
        len(tokens) % 16
    ]
    assert samples.warnings == (f"short.txt gives {samples.count} rows ({len(tokens)} tokens) where 128 of 16 tokens were asked for",)
    assert str(samples) == f"{samples.count} samples, {len(tokens)} tokens: the first disjoint windows of short.txt"


def test_a_special_token_spelled_in_a_text_is_one(tmp_path: Path) -> None:
    assert rows(load(tmp_path, write(tmp_path / "t.txt", "<|user|>a<|end|>"))) == [[1, *ids(tmp_path, "a"), 0]]


def test_marks_and_line_ends_of_windows(tmp_path: Path) -> None:
    want = rows(load(tmp_path, write(tmp_path / "t.txt", STORY)))
    got = load(tmp_path, write(tmp_path / "w.txt", b"\xef\xbb\xbf" + STORY.replace("\n", "\r\n").encode()))
    assert rows(got) == want
    line = b'\xef\xbb\xbf{"text": "rain"}\r\n\r\n{"text": "land"}\r\n'
    assert rows(load(tmp_path, write(tmp_path / "w.jsonl", line))) == [ids(tmp_path, "rain\n\nland")]


@pytest.mark.parametrize("before", [0, 7, 65535, 1 << 20, (1 << 20) + 3])
def test_a_byte_that_is_not_utf8_is_named(tmp_path: Path, before: int) -> None:
    # Characters of two bytes lie across the pieces that are read at once.
    text = ("x" * (before % 2)).encode() + "é".encode() * (before // 2)
    path = write(tmp_path / "t.txt", text + b"\xff" + STORY.encode())
    refused(f"t.txt: byte {before} is not UTF-8", tmp_path, path, num_samples=before // 16 + 100)
    half = write(tmp_path / "half.txt", text + b"\xc3")
    refused(f"half.txt: byte {before} is not UTF-8", tmp_path, half, num_samples=before // 16 + 100)


def test_documents_follow_each_other_with_a_blank_line(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", {"text": "the rain\n"}, {"text": " \n"}, {"text": None}, {"n": 1, "text": "\n  on the land"})
    assert rows(load(tmp_path, path, 4, 8)) == windows(ids(tmp_path, "the rain\n\n  on the land"), 2, 8)
    assert rows(load(tmp_path, ["the rain", "", "on the land"], 2, 8)) == windows(ids(tmp_path, "the rain\n\non the land"), 2, 8)
    assert load(tmp_path, ["the rain"] * 9, 2, 8).taken == "the first disjoint windows of 9 given texts"


def test_a_conversation_is_a_row(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "c.jsonl", {"messages": CHAT}, {"messages": []}, {"messages": CHAT[:1]}, {"messages": CHAT * 9})
    samples = load(tmp_path, path, 3, 40)
    assert rows(samples) == [
        ids(tmp_path, CHAT_TEXT),
        ids(tmp_path, "<|user|>the rain?<|end|>"),
        ids(tmp_path, CHAT_TEXT * 9)[:40],
    ]
    assert samples.taken == "the first conversations of c.jsonl" and samples.warnings == ()
    assert "c.jsonl gives 3 rows" in load(tmp_path, path, 4, 40).warnings[0]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "a"', r"t.jsonl, line 3: it is not JSON \(Expecting"),
        ("[" * 100_000, "line 3: it is not JSON"),
        ('"a"', "line 3: it is not a JSON object"),
        ('{"txet": "a"}', "line 3: no column 'text' among txet"),
        ('{"text": [{"role": "user"}]}', "line 3: column 'text' is neither a text nor a list of messages with role and content"),
        ('{"text": [{"role": "user", "content": 5}]}', "line 3: column 'text' is neither"),
        ('{"text": 5}', "line 3: column 'text' is neither a text nor a list of messages.* but of type int"),
        ('{"text": [{"from": "human", "value": "a"}]}', "line 3: .* but a list of something else"),
        ('{"text": "a\\ud800"}', "line 3: character 1 of its text is half of one"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    refused(words, tmp_path, write(tmp_path / "t.jsonl", '{"text": "good"}\n\n' + line + "\n"))


def test_columns(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", {"body": "the rain", "talk": CHAT})
    assert rows(load(tmp_path, path, dataset_column="body")) == [ids(tmp_path, "the rain")]
    assert rows(load(tmp_path, path, dataset_column="talk", sequence_length=99)) == [ids(tmp_path, CHAT_TEXT)]
    refused("line 1: no column 'text' or 'messages' among body, talk.*--dataset-column", tmp_path, path)
    refused("line 1: no column 'n' among body, talk", tmp_path, path, dataset_column="n")
    both = jsonl(tmp_path / "b.jsonl", {"messages": CHAT, "text": "the rain"})
    assert rows(load(tmp_path, both)) == [ids(tmp_path, "the rain")]


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BATCH", 2)
    texts = ["the rain", None, "on", " ", "the land"]
    path = table(tmp_path / "t.parquet", n=[1, 2, 3, 4, 5], text=texts)
    assert rows(load(tmp_path, path, 9, 8)) == windows(ids(tmp_path, "the rain\n\non\n\nthe land"), 2, 8)
    assert rows(load(tmp_path, table(tmp_path / "b.parquet", body=["on"]), dataset_column="body")) == [ids(tmp_path, "on")]
    refused("t.parquet: no column 'm' among n, text", tmp_path, path, dataset_column="m")
    refused("t.parquet, row 1: column 'n' is neither", tmp_path, path, dataset_column="n")
    refused("damaged.parquet: it cannot be read", tmp_path, write(tmp_path / "damaged.parquet", path.read_bytes()[:-9]))
    refused("none.parquet: no text", tmp_path, table(tmp_path / "none.parquet", text=pa.array([], pa.string())))


def test_chats_in_parquet(tmp_path: Path) -> None:
    # A table has every key in every message.
    path = table(tmp_path / "c.parquet", messages=[[*CHAT, {"role": "user", "content": "on", "name": "x"}], CHAT])
    wanted = [ids(tmp_path, CHAT_TEXT + "<|user|>on<|end|>"), ids(tmp_path, CHAT_TEXT)]
    assert rows(load(tmp_path, path, 2, 99)) == wanted


def test_a_folder_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "b.TXT", "the land\n")
    write(folder / "a.txt", "the rain")
    jsonl(folder / "c.jsonl", {"messages": CHAT})
    table(folder / "d.parquet", text=["on"])
    text = "the rain\n\nthe land\n"
    samples = load(tmp_path, folder, 9, 99)
    assert rows(samples) == [ids(tmp_path, text), ids(tmp_path, CHAT_TEXT), ids(tmp_path, "on")]
    assert samples.taken == "the first disjoint windows and conversations of data" and len(samples.warnings) == 1
    write(folder / "README.md", "read me")
    (folder / ".hidden.txt").touch()
    first = load(tmp_path, folder, 2, 99)
    assert rows(first) == rows(samples)[:2]
    assert first.warnings == (f"{folder}: 1 of its entries are no .txt, .jsonl, .parquet and were passed over, README.md for one",)


@pytest.mark.parametrize("name", ["none.txt", "data/none.jsonl", "./none", "~/llmcomp-has-no-such", "/llmcomp/none", "a/b/c", "C:\\none"])
def test_a_missing_file_is_not_asked_from_the_hub(tmp_path: Path, name: str) -> None:
    refused("no such file or folder", tmp_path, name)


def test_what_is_no_calibration_data(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused("empty: no .txt, .jsonl or .parquet file in it", tmp_path, tmp_path / "empty")
    refused("x.csv: .csv is none of .txt, .jsonl, .parquet", tmp_path, write(tmp_path / "x.csv", "a"))
    for name, content in (("e.txt", ""), ("blank.txt", "\r\n \n"), ("e.jsonl", ""), ("blank.jsonl", '{"text": " "}\n')):
        refused(f"{name}: no text in it", tmp_path, write(tmp_path / name, content))
    refused("1 given text: no text in it", tmp_path, [" "])
    refused("text 2 of the given ones: character 0", tmp_path, ["a", "\udfff"])
    (tmp_path / "link.txt").symlink_to(tmp_path / "nowhere")
    refused("link.txt: no such file", tmp_path, tmp_path / "link.txt")


def test_options_that_do_not_fit_the_data(tmp_path: Path) -> None:
    path = write(tmp_path / "t.txt", STORY)
    refused("--dataset-column: .*t.txt has no columns", tmp_path, path, OptionError, dataset_column="text")
    refused("--dataset-config: .*t.txt is no dataset of the hub", tmp_path, path, OptionError, dataset_config="x")
    refused("--dataset-column: texts are given as they are", tmp_path, ["a"], OptionError, dataset_column="text")
