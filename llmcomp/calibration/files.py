"""Calibration files, read piece by piece: .txt, .jsonl, .parquet, and a folder of these."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from llmcomp.calibration.items import Item, Record, Text, choose_column, items
from llmcomp.errors import CalibrationError

KINDS = (".txt", ".jsonl", ".parquet")
PIECE = 1 << 16
"""Characters of a .txt that are read at once."""
BATCH = 64
"""Rows of a .parquet that are decoded at once."""


def files_of(path: Path) -> tuple[list[Path], list[str]]:
    """The file itself, or the files of a folder by name, and the names of those in it that are passed over.

    Raises:
        CalibrationError: no such file, none of the three kinds, or a folder without one.
    """
    if path.is_dir():
        names = sorted(p for p in path.iterdir() if not p.name.startswith("."))
        found = [p for p in names if p.suffix.lower() in KINDS and p.is_file()]
        if not found:
            raise CalibrationError(str(path), f"no {', '.join(KINDS[:-1])} or {KINDS[-1]} file in it", "Give a folder that has some")
        return found, [p.name for p in names if p not in found]
    if not path.is_file():
        raise CalibrationError(str(path), "no such file or folder", "Check the path")
    if path.suffix.lower() not in KINDS:
        raise CalibrationError(str(path), f"{path.suffix or 'a name without ending'} is none of {', '.join(KINDS)}", "Convert or rename it")
    return [path], []


def read_file(path: Path, column: str | None) -> Iterator[Item]:
    """Its texts and chats, in order. Line ends of Windows are read as line feeds, and a byte order mark is no text.

    Raises:
        CalibrationError: it cannot be read, is not UTF-8 (with the byte), or a line or row is not what it should be (with its number).
    """
    kind = path.suffix.lower()
    if kind == ".txt":
        return _text(path)
    return items(_lines(path), column) if kind == ".jsonl" else items(_rows(path, column), column)


def read_records(path: Path) -> Iterator[Record]:
    """The rows of a .jsonl or .parquet, all columns.

    Raises:
        CalibrationError: as `read_file`.
    """
    return _lines(path) if path.suffix.lower() == ".jsonl" else _table(path, list)


def _text(path: Path) -> Iterator[Text]:
    with _opened(path) as file:
        begins = True
        while piece := file.read(PIECE):
            yield Text(piece, begins)
            begins = False


def _lines(path: Path) -> Iterator[Record]:
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise CalibrationError(where, f"it is not JSON ({error})", "Mend the line, or take it out") from None
            if not isinstance(record, dict):
                raise CalibrationError(where, "it is not a JSON object", 'Each line is one, such as {"text": "..."}')
            yield where, record


def _rows(path: Path, asked: str | None) -> Iterator[Record]:
    return _table(path, lambda names: [choose_column(str(path), names, asked)])


def _table(path: Path, choose: Callable[[list[str]], list[str]]) -> Iterator[Record]:
    """The rows of a .parquet, those of its columns that are chosen."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            columns = choose(file.schema_arrow.names)
            number = 0
            for batch in file.iter_batches(BATCH, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield file
    except UnicodeDecodeError:
        raise CalibrationError(str(path), f"byte {_bad_byte(path)} is not UTF-8", "Save the file as UTF-8") from None
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> CalibrationError:
    reason = (getattr(error, "strerror", None) or str(error)).strip().splitlines()[0]
    return CalibrationError(str(path), f"it cannot be read ({reason})", "Check the file and who may read it")


def _bad_byte(path: Path) -> int:
    """The offset of the first byte that is not UTF-8 in a file that has one."""
    decoder: Any = codecs.getincrementaldecoder("utf-8")()
    done = 0
    with path.open("rb") as file:
        while True:
            raw = file.read(1 << 20)
            held = len(decoder.getstate()[0])
            try:
                decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                return done - held + error.start
            if not raw:
                return done
            done += len(raw)
