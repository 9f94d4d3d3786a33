"""A tokenizer of bytes and a few merges, options, and what rows must be: the whole text's tokens, cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from llmcomp.calibration import Samples, load_samples
from llmcomp.options import ExportOptions
from tests.tiny import tiny_config, tiny_tokenizer

STORY = "".join(f"On day {n} the other rain in the land went {'on and ' * (n % 5)}on.\n" for n in range(400))


def tokenizer_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    if not folder.exists():
        folder.mkdir()
        tiny_tokenizer(folder)
    return folder


def load(tmp_path: Path, dataset: Any, num_samples: int = 4, sequence_length: int = 16, config: Any = None, **options: Any) -> Samples:
    dataset = str(dataset) if isinstance(dataset, Path) else dataset
    given = ExportOptions(model="m", dataset=dataset, num_samples=num_samples, sequence_length=sequence_length, **options)
    return load_samples(given, tokenizer_folder(tmp_path), config or tiny_config())


def ids(tmp_path: Path, text: str) -> list[int]:
    return Tokenizer.from_file(str(tokenizer_folder(tmp_path) / "tokenizer.json")).encode(text, add_special_tokens=False).ids


def rows(samples: Samples) -> list[list[int]]:
    assert all(row.dtype == np.int64 and row.ndim == 1 for row in samples.rows)
    return [row.tolist() for row in samples.rows]


def windows(tokens: list[int], count: int, length: int = 16) -> list[list[int]]:
    return [tokens[i * length : (i + 1) * length] for i in range(count)]
