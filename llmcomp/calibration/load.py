"""From --dataset to token rows, before a weight is read.

Texts are packed: documents follow each other with a blank line between them, are tokenized as one text, and are cut into disjoint windows. So
every row has the length that was asked for, whatever the documents' own, and no token is thrown away or made up; a .txt is one document. A
conversation is a row of its own, cut off at the length, since what its template writes at the beginning belongs there.

Rows are the first ones of the source, in its order, never shuffled: the same data gives the same rows, and a person can tell which.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcomp.calibration import hub
from llmcomp.calibration.files import KINDS, files_of, read_file
from llmcomp.calibration.items import Chat, Item, Text, check_text, items
from llmcomp.calibration.samples import Samples
from llmcomp.calibration.tokenizer import Tokenizer
from llmcomp.calibration.windows import cut
from llmcomp.checkpoint import Checkpoint
from llmcomp.errors import CalibrationError, OptionError
from llmcomp.options import ExportOptions

AUTO = "auto"
"""The dataset that `self_text` makes."""
POSITIONS = ("max_position_embeddings", "n_positions")


def samples_of(options: ExportOptions, checkpoint: Checkpoint) -> Samples:
    """`load_samples` with the tokenizer of a source of any kind.

    Raises:
        TokenizerError: the source has no tokenizer, and as `load_samples` does.
    """
    with _tokenizer_folder(checkpoint) as folder:
        return load_samples(options, folder, checkpoint.config)


@contextmanager
def tokenizer_of(checkpoint: Checkpoint, trust_remote_code: bool) -> Iterator[Tokenizer]:
    """The tokenizer of a source of any kind.

    Raises:
        TokenizerError: it has none, or it cannot be loaded.
    """
    with _tokenizer_folder(checkpoint) as folder:
        yield Tokenizer(folder, trust_remote_code)


@contextmanager
def _tokenizer_folder(checkpoint: Checkpoint) -> Iterator[Path]:
    checkpoint.check_tokenizer()
    if checkpoint.folder is not None:
        yield checkpoint.folder
        return
    with tempfile.TemporaryDirectory(prefix="llmcomp-tokenizer-") as folder:
        checkpoint.save_tokenizer(Path(folder))
        yield Path(folder)


def load_samples(options: ExportOptions, folder: Path, config: Mapping[str, Any]) -> Samples:
    """The rows of `options.dataset`, which is none of the model's own, by the tokenizer in `folder`; `config` is the model's.

    At most `num_samples` rows of at most `sequence_length` tokens; a length that was not asked for is at most the model's positions. Fewer rows
    than were asked for are a warning.

    Raises:
        CalibrationError: the data is missing, broken or empty, or makes tokens that the model does not have.
        HubError: a dataset of the hub that cannot be had.
        OptionError: an option that does not fit the data or the model.
        TokenizerError: the tokenizer cannot be loaded.
    """
    assert options.dataset not in (None, AUTO)
    length = row_length(options, config)
    source, stream, warnings = _open(options)
    tokenizer = Tokenizer(folder, options.trust_remote_code)
    rows: list[NDArray[np.int64]] = []
    kinds: list[str] = []
    for chats, group in groupby(stream, lambda item: isinstance(item, Chat)):
        rows += (_conversations if chats else _windows)(group, tokenizer, options.num_samples - len(rows), length)
        kinds.append("conversations" if chats else "disjoint windows")
        if len(rows) == options.num_samples:
            break
    if not rows:
        raise CalibrationError(source, "no text in it", "Give data that has some")
    check_ids(rows, config, source)
    if len(rows) < options.num_samples:
        rows_told = f"{len(rows)} {'row' if len(rows) == 1 else 'rows'} ({sum(map(len, rows))} tokens)"
        warnings.append(f"{source} gives {rows_told} where {options.num_samples} of {length} tokens were asked for")
    return Samples(source, f"the first {' and '.join(dict.fromkeys(kinds))} of {source}", tuple(rows), tuple(warnings))


def row_length(options: ExportOptions, config: Mapping[str, Any]) -> int:
    """Tokens of a row for a model with this config.

    Raises:
        OptionError: more were asked for than the model has positions.
    """
    text_config = config.get("text_config")
    places = [config, text_config] if isinstance(text_config, Mapping) else [config]
    known = [place[key] for place in places for key in POSITIONS if isinstance(place.get(key), int)]
    if not known or options.sequence_length <= min(known):
        return options.sequence_length
    if "sequence_length" in options.model_fields_set:
        raise OptionError(
            f"--sequence-length {options.sequence_length}", f"the model has {min(known)} positions", f"Use at most {min(known)}"
        )
    return min(known)


def _open(options: ExportOptions) -> tuple[str, Iterator[Item], list[str]]:
    """The source's name, its texts and chats, and warnings."""
    dataset, column = options.dataset, options.dataset_column
    if isinstance(dataset, tuple):
        _refuse_column(options, "texts are given as they are")
        return f"{len(dataset)} given {'text' if len(dataset) == 1 else 'texts'}", _given(dataset), []
    assert dataset is not None
    # Before a file of the same name, which ./NAME means.
    name = dataset.partition(":")[0]
    if name in hub.KNOWN:
        _refuse_column(options, f"{name} has its own")
    elif is_path(dataset):
        if options.dataset_config is not None:
            raise OptionError("--dataset-config", f"{dataset} is no dataset of the hub", "Leave it out")
        files, others = files_of(Path(dataset).expanduser())
        if all(f.suffix.lower() == ".txt" for f in files):
            _refuse_column(options, f"{dataset} has no columns")
        passed = (
            f"{dataset}: {len(others)} of its entries are no {', '.join(KINDS)} and were passed over, {others[0]} for one" if others else ""
        )
        return Path(dataset).name, (item for file in files for item in read_file(file, column)), [passed] if passed else []
    found = hub.find(dataset, options.dataset_config)
    return str(found), items(hub.read_hub(found, options.token), column), []


def is_path(dataset: str) -> bool:
    """Whether a data set is a file or a folder, and not one of the hub."""
    path = Path(dataset).expanduser()
    looks = path.suffix.lower() in KINDS or path.is_absolute() or dataset.startswith((".", "~")) or "\\" in dataset
    return looks or dataset.count("/") > 1 or path.exists()


def _refuse_column(options: ExportOptions, reason: str) -> None:
    flag = "--dataset-column" if options.dataset_column is not None else "--dataset-config"
    if options.dataset_column is not None or options.dataset_config is not None:
        raise OptionError(flag, reason, "Leave it out")


def _given(texts: Iterable[str]) -> Iterator[Item]:
    for number, text in enumerate(texts, 1):
        check_text(text, f"text {number} of the given ones")
        if text.strip():
            yield Text(text)


def _windows(group: Iterator[Any], tokenizer: Tokenizer, count: int, length: int) -> list[NDArray[np.int64]]:
    return cut(group, tokenizer.encode, count, length)


def _conversations(group: Iterator[Any], tokenizer: Tokenizer, count: int, length: int) -> list[NDArray[np.int64]]:
    rows: list[NDArray[np.int64]] = []
    for chat in group:
        row = tokenizer.encode_chat(chat.messages, chat.where)[:length]
        if len(row):
            rows.append(row)
        if len(rows) == count:
            break
    return rows


def check_ids(rows: Iterable[NDArray[np.int64]], config: Mapping[str, Any], source: str) -> None:
    """
    Raises:
        CalibrationError: a token that the model with this config does not have.
    """
    size, largest = config.get("vocab_size"), max(int(row.max()) for row in rows)
    if isinstance(size, int) and largest >= size:
        raise CalibrationError(
            source, f"the tokenizer makes token {largest} of it, and the model has {size}", "Use the tokenizer that belongs to the model"
        )
