"""What to judge on: a file, a hub dataset, or text that Python itself ships."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from llmcomp.judge.errors import JudgeError
from llmcomp.judge.hub import offline, trouble

COLUMNS = ("text", "sentence", "content")


@dataclass(frozen=True)
class Text:
    name: str
    content: str


def load_text(file: str | None = None, dataset: str | None = None, config: str | None = None, column: str | None = None) -> Text:
    """The text to judge on; without arguments the topics of Python's own help, about 500 kB of technical English.

    `dataset` is `NAME` or `NAME:SPLIT` (split `test` unless given); its rows are joined by blank lines, as papers do with WikiText-2.

    Raises:
        JudgeError: no such file, not UTF-8, the hub cannot be reached, no such column.
    """
    if file is not None:
        try:
            return Text(Path(file).name, Path(file).read_text(encoding="utf8"))
        except FileNotFoundError:
            raise JudgeError(f"text {file}: no such file. Check the path.") from None
        except (OSError, UnicodeDecodeError) as error:
            raise JudgeError(f"text {file}: it cannot be read ({error}). Give a UTF-8 text file.") from None
    if dataset is not None:
        return _dataset(dataset, config, column)
    from pydoc_data.topics import topics

    return Text("Python's help topics", "\n\n".join(topics[name] for name in sorted(topics)))


def _dataset(name: str, config: str | None, column: str | None) -> Text:
    import datasets

    repo, _, split = name.partition(":")
    reason = None if Path(repo).exists() else trouble()
    try:
        with offline() if reason else nullcontext():
            rows = datasets.load_dataset(repo, config, split=split or "test")
    except Exception as error:  # the library raises many kinds; each means that there is no text
        if reason:
            raise JudgeError(f"dataset {name}: {reason}, and it is not in the cache. Check the network, or give --text FILE.") from None
        told = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise JudgeError(
            f"dataset {name}: it cannot be loaded ({told}). Check name, split and --dataset-config, or give --text FILE."
        ) from None
    found = column or next((c for c in COLUMNS if c in rows.column_names), None)
    if found not in rows.column_names:
        raise JudgeError(f"dataset {name}: no column {found!r} among {', '.join(rows.column_names)}. Name one with --dataset-column.")
    return Text(name, "\n\n".join(str(row) for row in rows[found]))
