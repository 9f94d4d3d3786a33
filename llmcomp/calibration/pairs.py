"""Prompts with completions: two columns of a data set, as token rows that say where the completion begins.

Each is tokenized by itself, so that a prompt has the tokens that it has when it stands alone, and joined without a blank. Before the prompt stands what the
tokenizer puts before every text, behind the completion the model's end token, which it is to learn to say. With the chat template a prompt is what the user
says, a completion what the assistant answers, and the template alone says what stands around them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.calibration import hub
from llmcomp.calibration.files import files_of, read_records
from llmcomp.calibration.items import Record, check_text
from llmcomp.calibration.load import check_ids, is_path, tokenizer_of
from llmcomp.calibration.tokenizer import Tokenizer
from llmcomp.checkpoint import Checkpoint
from llmcomp.errors import CalibrationError
from llmcomp.options import ExportOptions

Pair = tuple[NDArray[np.int64], int]
"""(tokens of prompt and completion, how many of them are the prompt's)."""


@dataclass(frozen=True)
class Columns:
    """How pairs are read."""

    prompt: str = "prompt"
    completion: str = "completion"
    chat: bool = False
    """By the model's chat template."""


def read_pairs(
    options: ExportOptions, checkpoint: Checkpoint, dataset: str, columns: Columns, length: int, tokens: int, more: int
) -> list[Pair]:
    """The first pairs of `dataset`, .jsonl or .parquet files or one of the hub, none twice: until they have `tokens`, each cut off at `length`, and
    `more` pairs behind these, or as many as there are.

    Raises:
        CalibrationError: a row without the columns, or with something else than text in them; an empty completion; one that lies behind `length` as a whole.
        HubError, TokenizerError: as for calibration data.
    """
    source, records = _open(options, dataset)
    found: dict[bytes, Pair] = {}
    total, end = 0, _end(checkpoint.config)
    with tokenizer_of(checkpoint, options.trust_remote_code) as tokenizer:
        for where, record in records:
            ids, begins = _pair(tokenizer, where, *_texts(where, record, columns), columns.chat, end)
            if begins >= length:
                raise CalibrationError(
                    where, f"its prompt has {begins} tokens, so that its completion lies behind the {length} of a row",
                    "Give a larger --train-length, or take the row out",
                )  # fmt: skip
            pair = (ids[:length], begins)
            if found.setdefault(pair[0].tobytes(), pair) is not pair:
                continue
            if total >= tokens:
                more -= 1
            total += len(pair[0])
            if more <= 0 and total >= tokens:
                break
    if found:
        check_ids([ids for ids, _ in found.values()], checkpoint.config, source)
    return list(found.values())


def _open(options: ExportOptions, dataset: str) -> tuple[str, Iterator[Record]]:
    if dataset.partition(":")[0] not in hub.KNOWN and is_path(dataset):
        files, _ = files_of(Path(dataset).expanduser())
        texts = [f for f in files if f.suffix.lower() == ".txt"]
        if texts:
            raise CalibrationError(str(texts[0]), "a .txt has no columns, prompts and completions are two", "Give a .jsonl or a .parquet")
        return Path(dataset).name, chain.from_iterable(map(read_records, files))
    # What makes one text of its columns is of no use here.
    found = replace(hub.find(dataset, options.dataset_config), write=None)
    return str(found), hub.read_hub(found, options.token)


def _texts(where: str, record: Mapping[str, Any], columns: Columns) -> tuple[str, str]:
    for column, flag in ((columns.prompt, "--prompt-column"), (columns.completion, "--completion-column")):
        if column not in record:
            among = ", ".join(map(str, record)) or "none at all"
            raise CalibrationError(where, f"no column {column!r} among {among}", f"Name it with {flag}")
        if not isinstance(record[column], str):
            raise CalibrationError(where, f"column {column!r} is no text, but of type {type(record[column]).__name__}", "Mend the data")
        check_text(record[column], where)
    if not record[columns.completion].strip():
        raise CalibrationError(where, f"its completion, column {columns.completion!r}, is empty", "Mend the row, or take it out")
    return record[columns.prompt], record[columns.completion]


def _end(config: Mapping[str, Any]) -> list[int]:
    """The first of the tokens that end a text, none if the model knows none."""
    told = config.get("eos_token_id")
    return [int(token) for token in (told if isinstance(told, list) else [told])[:1] if isinstance(token, int)]


def _pair(tokenizer: Tokenizer, where: str, prompt: str, completion: str, chat: bool, end: list[int]) -> Pair:
    if chat:
        asked = [{"role": "user", "content": prompt}]
        first, whole = (
            tokenizer.chat_text(asked, where, True),
            tokenizer.chat_text([*asked, {"role": "assistant", "content": completion}], where),
        )
        if not whole.startswith(first):
            raise CalibrationError(
                where, "the model's chat template writes a question otherwise once it is answered, so that it is not known where the answer begins",
                "Leave out --chat-template, and write the texts as the model is to see them",
            )  # fmt: skip
        prompt, completion = first, whole[len(first) :]
    asked_ids, told_ids = tokenizer.encode(prompt), tokenizer.encode(completion)
    if not chat:
        asked_ids = np.concatenate([tokenizer.beginning(), asked_ids])
    if not len(told_ids) or len(asked_ids) + len(told_ids) < 2:
        raise CalibrationError(where, "no token of its completion follows another", "Mend the row, or take it out")
    if not chat and told_ids[-1:].tolist() != end:
        told_ids = np.concatenate([told_ids, np.array(end, np.int64)])
    return np.concatenate([asked_ids, told_ids]), len(asked_ids)
