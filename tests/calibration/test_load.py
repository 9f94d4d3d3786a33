"""What depends on the model: its tokenizer, vocabulary and positions."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmcomp import checkpoint
from llmcomp.calibration import load_samples, samples_of
from llmcomp.calibration.load import row_length
from llmcomp.errors import CalibrationError, OptionError, TokenizerError
from llmcomp.options import ExportOptions
from tests.calibration.helpers import STORY, ids, load, rows, tokenizer_folder, windows
from tests.checkpoint.gguf_file import write_gguf
from tests.tiny import tiny_config, tiny_llama


def test_the_default_is_128_rows_of_256(tmp_path: Path) -> None:
    samples = load_samples(ExportOptions(model="m", dataset=[STORY * 4]), tokenizer_folder(tmp_path), {})
    assert rows(samples) == windows(ids(tmp_path, STORY * 4), 128, 256)
    assert str(samples) == "128 samples of 256 tokens: the first disjoint windows of 1 given text"


def test_a_length_beyond_the_model(tmp_path: Path) -> None:
    asked, unasked = ExportOptions(model="m", dataset="x", sequence_length=256), ExportOptions(model="m", dataset="x")
    for config in ({"max_position_embeddings": 64}, {"n_positions": 64}, {"text_config": {"max_position_embeddings": 64}}):
        assert row_length(unasked, config) == 64
        with pytest.raises(OptionError, match=r"--sequence-length 256: the model has 64 positions. Use at most 64"):
            row_length(asked, config)
    assert row_length(asked, {"max_position_embeddings": 256}) == row_length(asked, {}) == 256


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"1 given text: the tokenizer makes token \d+ of it, and the model has 20"):
        load(tmp_path, ["the rain"], config=tiny_config(vocab_size=20))


def test_of_a_folder_and_of_a_gguf(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "tiny")
    options = ExportOptions(model="m", dataset=[STORY], num_samples=2, sequence_length=16)
    assert rows(samples_of(options, checkpoint.open(tmp_path / "tiny"))) == windows(ids(tmp_path, STORY), 2)
    write_gguf(tmp_path / "tiny.gguf")
    path = tmp_path / "c.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "12 the<|user|>"}]}\n')
    options = ExportOptions(model="m", dataset=str(path), num_samples=1)
    # Its template gives the content alone. "12" is one token by the merges, and digits are cut apart before.
    (row,) = rows(samples_of(options, checkpoint.open(tmp_path / "tiny.gguf")))
    assert len(row) == 4 and row[-1] == 1


def test_without_a_tokenizer(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "tiny", tokenizer=False)
    with pytest.raises(TokenizerError, match="no tokenizer in it"):
        samples_of(ExportOptions(model="m", dataset=["a"]), checkpoint.open(tmp_path / "tiny"))
